"""For somebody with GPUs: `torchrun --nproc-per-node=N -m spardl.bench.gpu` checks, times, and writes a report.

We have none: what runs on a GPU here was never run by us. The report says whether its kernels give the bits of the
compiled ones of a CPU, whether all ranks get the same from a step, and how long selections and whole steps take beside
a dense all-reduce and torch's own hooks. Without a GPU it runs on CPU tensors over gloo, as a smoke test, and says so.
Alone, it is a group of one. The report names no machine, and explains itself.
"""

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from spardl import kernels
from spardl.allreduce import all_reduce, forget
from spardl.kernels import Kernels
from spardl.memory.layout import BlockLayout
from spardl.version import __version__
from spardl.wire.format import FrameFormat, value_format

CHECKED = 100_003  # elements, over a few blocks of odd lengths
BLOCKS = 5

EXPLAINED = {
    "bits": "of each kernel, whether it gave the bits of the compiled ones of a CPU; and whether all ranks got the same"
    " from a step. On every rank",
    "milliseconds": "the median of so many steps, of the slowest rank",
    "selection": "a copy of the vector, and its largest entries taken out; no exchange",
    "dense all-reduce": "a copy of the vector, and torch.distributed.all_reduce of it, in float32",
    "spardl, bf16": "a copy of the vector, and spardl.all_reduce of it: accumulate, select, exchange, average",
    "spardl, int8": "the same, with values of 8 bits",
    "DDP": "forward and backward of one square matrix of about as many elements, with DDP's own all-reduce",
    "DDP, fp16 hook": "the same, with torch's fp16_compress_hook",
    "DDP, PowerSGD": "the same, with torch's powerSGD_hook, rank 4",
}


def main(arguments: list[str] | None = None) -> int:
    """Run everything on this rank; rank 0 prints and writes the report. 1 if any bit differs."""
    asked = _parse(arguments)
    device = _begin()
    try:
        report = {
            **_machine(device),
            "elements": asked.elements,
            "density": asked.density,
            "steps": asked.steps,
            "bits": _on_every_rank({**check_bits(device), "step": check_step(device)}, device),
            "milliseconds": times(device, asked.elements, asked.density, asked.steps),
            "explained": EXPLAINED,
        }
        if dist.get_rank() == 0:
            print(describe(report))
            asked.out.write_text(json.dumps(report, indent=2) + "\n")
            print(f"written to {asked.out}; please send it to us.")
        return 0 if all(report["bits"].values()) else 1
    finally:
        dist.destroy_process_group()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spardl.bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the vector that is synchronised")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20, help="to time, after three that do not count")
    parser.add_argument("--out", type=Path, default=Path("spardl-gpu.json"))
    return parser.parse_args(arguments)


def _begin() -> torch.device:
    """Join the other ranks, if a launcher has started some; this rank's GPU, or the CPU."""
    found = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if found else "gloo")
    else:
        dist.init_process_group("nccl" if found else "gloo", store=HashStore(), rank=0, world_size=1)
    if not found:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _machine(device: torch.device) -> dict[str, Any]:
    """What runs, and on what; of all ranks how many machines and which GPUs there are, and no name of any."""
    on_gpu = device.type == "cuda"
    here = torch.cuda.get_device_name(device) if on_gpu else "no GPU was found: CPU tensors, a smoke test"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (platform.node(), here))
    found = importlib.util.find_spec("triton") is not None
    return {
        "spardl": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "triton": importlib.metadata.version("triton") if on_gpu and found else None,
        "python": platform.python_version(),
        "workers": dist.get_world_size(),
        "machines": len({name for name, _ in everyone}),
        "backend": dist.get_backend(),
        "device": "; ".join(sorted({kind for _, kind in everyone})),
        "kernels": type(_kernels_to_check(device)).__name__,
    }


# --- bits -----------------------------------------------------------------------------------------------------------


def check_bits(device: torch.device) -> dict[str, bool]:
    """Of each kernel, whether it gives the bits of the compiled one. On a CPU the portable ones are checked."""
    here, compiled = _kernels_to_check(device), kernels.for_device(torch.device("cpu"))
    checks: dict[str, Callable[[Kernels, torch.device], list[Any]]] = {
        "accumulate": _accumulated,
        "accumulate_momentum": _with_momentum,
        "differ": _differences,
        "take_largest": _largest,
        "take_rounded": _framed,
        "take_above": _above,
    }
    for name in ("fp16", "int8", "int4", "int1"):
        checks[f"values in {name}"] = functools.partial(_coded, name)
    return {name: _same(check(here, device), check(compiled, torch.device("cpu"))) for name, check in checks.items()}


def _kernels_to_check(device: torch.device) -> Any:
    from spardl.kernels.torch import TorchKernels

    return kernels.for_device(device) if device.type != "cpu" else TorchKernels()


def check_step(device: torch.device) -> bool:
    """Whether all ranks get the same bits from a step, of gradients that are not the same."""
    vector = _numbers(100 + dist.get_rank(), device)
    all_reduce(vector, name="checked", density=0.01, dense_below=0)
    forget("checked")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, hashlib.sha256(_on_host(vector).tobytes()).hexdigest())
    return len(set(everyone)) == 1


def _on_every_rank(found: dict[str, bool], device: torch.device) -> dict[str, bool]:
    """What holds on all ranks."""
    flags = torch.tensor([float(each) for each in found.values()], device=device)
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    return dict(zip(found, map(bool, flags.tolist()), strict=True))


def _numbers(seed: int, device: torch.device) -> Tensor:
    return (torch.randn(CHECKED, generator=torch.Generator().manual_seed(seed)) ** 3).to(device, non_blocking=True)


_layout = BlockLayout(CHECKED, BLOCKS, 64)


def _accumulated(with_: Kernels, device: torch.device) -> list[Any]:
    memory, gradient = _numbers(0, device), _numbers(1, device)
    wanted = np.arange(BLOCKS) != 2
    with_.accumulate(with_.array(memory), _layout.starts, _layout.chunk, 0, gradient, 0.1, wanted)
    return [memory, gradient]


def _with_momentum(with_: Kernels, device: torch.device) -> list[Any]:
    memory, velocity, updated, gradient, weights = (_numbers(seed, device) for seed in range(5, 10))
    place, rule = (_layout.starts, _layout.chunk, 0), (0.1, 0.9, 1e-4, 0.7)
    wanted = np.arange(BLOCKS) != 2
    with_.accumulate_momentum(with_.array(memory), velocity, updated, *place, gradient, weights, *rule, True, wanted)
    return [memory, velocity, updated, gradient]


def _differences(with_: Kernels, device: torch.device) -> list[Any]:
    memory, shared, own = (_numbers(seed, device) for seed in range(10, 13))
    with_.differ(with_.array(memory), _layout.starts, _layout.chunk, 0, shared, own, np.arange(BLOCKS) != 2)
    return [memory]


def _coded(name: str, with_: Kernels, device: torch.device) -> list[Any]:
    """Values as codes and scales, and back."""
    form, counts = value_format(name), np.diff(_layout.starts)
    codes, scales = with_.encode(form, _numbers(13, device), counts)
    return [codes, scales, with_.decode(form, codes, scales, counts)]


def _largest(with_: Kernels, device: torch.device) -> list[Any]:
    memory = _numbers(2, device)
    return [*with_.take_largest(with_.array(memory), *_blocks()), memory]


def _framed(with_: Kernels, device: torch.device) -> list[Any]:
    """Taken, rounded, written as a frame and read again."""
    from spardl.kernels.api import CodedEntries

    memory = _numbers(3, device)
    firsts, stops, budgets = _blocks()
    counts, places, codes, _ = with_.take_rounded(with_.array(memory), firsts, stops, budgets)
    form = FrameFormat(value_format("bf16"), "fixed")  # the same bytes from kernels that fill and those that count
    entries = CodedEntries(counts, places, codes, with_.array(torch.zeros(0, device=device)))
    frame = with_.write_frame(form, False, stops - firsts, budgets, entries)
    count, found = with_.read_frame(frame, form, stops - firsts, budgets)
    return [count, frame, found.places, memory]


def _above(with_: Kernels, device: torch.device) -> list[Any]:
    memory = _numbers(4, device)
    count = int(_on_host(with_.count_above(with_.array(memory[10 : CHECKED - 10]), 2.5)))
    return [count, *with_.take_above(with_.array(memory), 10, CHECKED - 10, 2.5, min(5000, count)), memory]


def _blocks() -> tuple[Any, Any, Any]:
    return _layout.starts[:-1], _layout.starts[1:], np.full(BLOCKS, 200)


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(map(_on_host, ours), map(_on_host, theirs), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


def _on_host(value: Any) -> Any:
    return np.asarray(value.cpu() if isinstance(value, Tensor) else value)


# --- times ----------------------------------------------------------------------------------------------------------


def times(device: torch.device, elements: int, density: float, steps: int) -> dict[str, float]:
    """The median milliseconds of each, of the slowest rank."""
    vector = torch.randn(elements, device=device) ** 3
    found = {"selection": _timed(_selection(vector, density), device, steps)}
    found["dense all-reduce"] = _timed(lambda: dist.all_reduce(vector.clone()), device, steps)
    for values in ("bf16", "int8"):
        name = f"spardl, {values}"
        step = functools.partial(_step, vector, name, density, values)
        found[name] = _timed(step, device, steps)
        forget(name)
    for name in ("DDP", "DDP, fp16 hook", "DDP, PowerSGD"):
        found[name] = _timed(_backward(name, device, elements), device, steps)
    return found


def _selection(vector: Tensor, density: float) -> Callable[[], object]:
    """Take the largest entries of the whole vector out of a copy."""
    own = kernels.for_device(vector.device)
    whole = np.array([0]), np.array([vector.numel()]), np.array([max(1, int(density * vector.numel()))])
    return lambda: own.take_largest(own.array(vector.clone()), *whole)


def _step(vector: Tensor, name: str, density: float, values: str) -> None:
    all_reduce(vector.clone(), name=name, density=density, values=values, dense_below=0)


def _backward(name: str, device: torch.device, elements: int) -> Callable[[], None]:
    """Forward and backward of one square matrix with about so many elements; nearly all of it is the exchange."""
    side = max(2, round(elements**0.5))
    model = DistributedDataParallel(nn.Linear(side, side, bias=False, device=device))
    if name.endswith("fp16 hook"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name.endswith("PowerSGD"):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    row = torch.ones(1, side, device=device)
    return lambda: model(row).sum().backward()


def _timed(job: Callable[[], object], device: torch.device, steps: int) -> float:
    for _ in range(3):
        job()
    found = []
    for _ in range(steps):
        dist.barrier()
        _finish(device)
        started = time.perf_counter()
        job()
        _finish(device)
        found.append(1e3 * (time.perf_counter() - started))
    slowest = torch.tensor(statistics.median(found), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 3)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(report: dict[str, Any]) -> str:
    """The report for people: what runs, whether bits are the same, and times, also beside a dense all-reduce's."""
    dense = report["milliseconds"].get("dense all-reduce", 0.0)
    made_with = ("spardl", "torch", "cuda", "nccl", "triton", "python")
    lines = [
        report["device"],
        f"{report['workers']} worker(s) on {report['machines']} machine(s) over {report['backend']}",
        ", ".join(f"{name} {report[name]}" for name in made_with if report[name]),
        f"{report['elements']:,} elements, density {report['density']:g}, {report['steps']} step(s) each",
        f"bits of {report['kernels']}, beside those of compiled kernels on the CPU:",
        *(f"  {name:<20} {'the same bits' if same else 'OTHER BITS'}" for name, same in report["bits"].items()),
        "times, and how many times a dense all-reduce's:",
        *(_line(name, taken, dense) for name, taken in report["milliseconds"].items()),
    ]
    return "\n".join(lines)


def _line(name: str, taken: float, dense: float) -> str:
    share = f"{taken / dense:7.2f}x" if dense else " " * 8
    return f"  {name:<18} {taken:10.3f} ms {share}  {EXPLAINED.get(name, '')}"


if __name__ == "__main__":
    raise SystemExit(main())
