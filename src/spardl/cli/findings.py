"""What `spardl doctor` finds on this machine, before any rank talks to another: one sentence each, and what to do."""

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from spardl.extras import how_to_install, is_installed
from spardl.machine import WITHOUT_AMX, claims_amx_in_vain, cores
from spardl.version import __version__

Verdict = Literal["good", "note", "bad"]

# What must be there, as distributions and as modules; and what each optional one is for.
CORE = ("torch", "numpy", "numba")
OPTIONAL = {
    "rich": "tables and bars on terminals",
    "sklearn": "the digits",
    "tensorboard": "TensorBoard's files",
    "matplotlib": "pictures",
    "PIL": "Tiny ImageNet",
    "mpi4py": "transport mpi",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "transformers": "Hugging Face Trainer",
}
DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow"}

TORCH_PORT = 29500  # where torchrun's ranks meet unless told otherwise
BUSY = 1.0  # load per core, beside which ours has to share it
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `good` works; `note` works, but could be better; `bad` does not work."""

    topic: str
    verdict: Verdict
    text: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)


def local_findings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Everything that one process can see by itself. A look that fails is a finding as well, and the others go on."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": versions,
        "devices": devices,
        "cores": cores_and_load,
        "instructions": lambda: instructions(environment),
        "network": lambda: network(environment),
        "ports": ports,
        "kernels": compiled_loops,
    }
    for topic, look in looks.items():
        try:
            yield from look()
        except Exception as error:
            yield Finding(topic, "bad", f"looking at it failed: {type(error).__name__}: {one_line(error)}")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# --- versions -------------------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    """What is installed. What is missing of the core does not work; what is optional is named with its use."""
    found = {"spardl": __version__, "python": platform.python_version(), **installed(CORE)}
    missing = [name for name in CORE if name not in found]
    yield Finding("versions", "good", ", ".join(f"{name} {version}" for name, version in found.items()))
    if missing:
        command = f"install it with: pip install {' '.join(missing)}"
        yield Finding(
            "versions", "bad", f"{', '.join(missing)} is not installed, and nothing works without it.", command
        )
    optional = installed(tuple(OPTIONAL))
    have = ", ".join(f"{name} {version}" for name, version in optional.items())
    yield Finding("extras", "good", f"there is {have}." if have else "none is installed.")
    absent = [name for name in OPTIONAL if name not in optional]
    if absent:
        told = "; ".join(f"{OPTIONAL[name]}: {how_to_install(name)}" for name in absent)
        yield Finding("extras", "good", f"not installed, and needed only for what they are for: {told}.")


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those that can be imported, without importing them."""
    found = {}
    for name in names:
        if is_installed(name):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(DISTRIBUTION.get(name, name))
    return found


# --- machine --------------------------------------------------------------------------------------------------------


def devices() -> Iterator[Finding]:
    """Where tensors can be. Importing torch is part of the look."""
    import torch
    import torch.distributed as dist

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    kinds = f"{len(names)} GPUs: {', '.join(names)}" if names else "no GPU that torch can use; CPU only"
    yield Finding("devices", "good", f"{kinds}.")
    if not (dist.is_available() and dist.is_gloo_available()):
        text = "this torch was built without torch.distributed or gloo, which ranks meet by."
        yield Finding("devices", "bad", text, "install torch from PyPI or pytorch.org, which has both.")


def cores_and_load() -> Iterator[Finding]:
    mine, all_of_them = cores(), os.cpu_count() or 1
    part = f"{mine} of {all_of_them} cores" if mine < all_of_them else f"{mine} cores"
    text = f"{part} for this process"
    load = os.getloadavg()[0]
    if load > BUSY * mine and load > mine + 1:
        advice = "times measured now say little; wait until it is quiet before you compare any."
        yield Finding("cores", "note", f"{text}, and a load of {load:.1f}: others compute here.", advice)
    else:
        yield Finding("cores", "good", f"{text}, load {load:.1f}.")


def instructions(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether this machine has the instructions that torch takes it to have."""
    if claims_amx_in_vain(environment):
        text = "this machine announces AMX and has none: a process that multiplies matrices of bfloat16 is killed."
        advice = " ".join(f"{name}={value}" for name, value in WITHOUT_AMX.items())
        yield Finding("instructions", "bad", text, f"set {advice} wherever you train with 16 bits.")
    else:
        yield Finding("instructions", "good", "matrices of 16 bits can be multiplied.")


# --- network --------------------------------------------------------------------------------------------------------


def network(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The interfaces, and the address that gloo and our own connections would listen at."""
    known = interfaces()
    listed = ", ".join(f"{name} {address or 'without an IPv4 address'}" for name, address in known.items())
    yield Finding("network", "good", f"interfaces: {listed or 'none'}.")
    asked = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    yield told_interface(asked, known) if asked else found_address(known)


def told_interface(asked: str, known: Mapping[str, str | None]) -> Finding:
    """GLOO_SOCKET_IFNAME names an interface: is it there?"""
    if asked not in known:
        advice = f"set it to one of {', '.join(known)}, the one that reaches the other machines."
        return Finding("network", "bad", f"GLOO_SOCKET_IFNAME is {asked}, and there is no such interface.", advice)
    text = f"GLOO_SOCKET_IFNAME is {asked}, so ranks listen at {known[asked] or 'its IPv6 address'}."
    if (known[asked] or "").startswith("127."):
        return Finding("network", "note", text, "for this machine alone; unset it to reach others.")
    return Finding("network", "good", text)


def found_address(known: Mapping[str, str | None]) -> Finding:
    """Without it, gloo takes the address that this machine's own name resolves to."""
    name = socket.gethostname()
    outward = [f"GLOO_SOCKET_IFNAME={each}" for each, address in known.items() if address and address[:4] != "127."]
    advice = f"for ranks on several machines, set {' or '.join(outward) or 'GLOO_SOCKET_IFNAME'} on each."
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        text = f"the name of this machine, {name}, resolves to no address, so gloo falls back to loopback."
        return Finding("network", "note", text, advice)
    text = f"gloo would use {address}, which is what {name} resolves to"
    if address.startswith("127.") or address == "::1":
        return Finding("network", "note", f"{text}: loopback, which only this machine reaches.", advice)
    return Finding("network", "good", f"{text}; GLOO_SOCKET_IFNAME would name another interface.")


def interfaces() -> dict[str, str | None]:
    """The interfaces of this machine, each with its IPv4 address, if it has one."""
    found: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = None
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def ports() -> Iterator[Finding]:
    """Whether a process can listen and call at all; which ports a firewall has to let through."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5),
    ):
        pass
    reach = ""
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        reach = f" ({low} to {high})"
    text = f"connections work here; between machines, let TCP through at all ports that the system chooses{reach}."
    yield Finding("ports", "good", text)
    yield torch_port(TORCH_PORT)


def torch_port(port: int) -> Finding:
    """The port where torchrun's ranks meet by default."""
    try:
        with socket.create_server(("", port)):
            return Finding("ports", "good", f"port {port}, torchrun's own choice for --master-port, is free.")
    except OSError as error:
        reason = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        advice = "give torchrun another --master-port, or --standalone on one machine."
        return Finding("ports", "note", f"port {port}, torchrun's own choice for --master-port, is {reason}.", advice)


# --- compiled loops -------------------------------------------------------------------------------------------------


def compiled_loops() -> Iterator[Finding]:
    """Load the loops, compile them where nobody has, and say where they are kept."""
    import torch

    from spardl import kernels
    from spardl.kernels.cache import REMEDY, kept_in

    started = time.monotonic()
    kernels.for_device(torch.device("cpu"))
    seconds = time.monotonic() - started
    kept = kept_in("spardl.kernels.cpu.selection")
    how = f"compiled now, in {seconds:.0f} s," if kept.compiled else f"read from disk in {seconds:.1f} s,"
    text = f"the loops were {how} and are kept in {kept.folder}"
    if kept.for_a_while:
        yield Finding("kernels", "note", f"{text}, which may not last: no other folder can be written.", REMEDY)
    else:
        yield Finding("kernels", "good", f"{text}.")
