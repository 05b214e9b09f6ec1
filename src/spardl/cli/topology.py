"""`--topology`: a network by name, or from a TOML file.

A file names the workers and the links; nodes are whatever links name, workers are `worker 0`, `worker 1`, ...

    workers = 4                     # optional: --workers must be the same

    [[link]]
    from = "worker *"               # every worker has one; * stands for anything
    to = "switch"
    rate = "1gbit"                  # there, and back unless `back` says otherwise; default: unlimited
    back = "100mbit"
    latency = "50us"                # default: none
    loss = 0.001                    # share of packets; default: none
"""

import argparse
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spardl.choices import check_choice
from spardl.cli.parser import number_of
from spardl.cli.units import bytes_per_second, seconds
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from spardl.simulator.graph import Cable, Graph
    from spardl.simulator.network import Change, Network

NAMES = ("switch", "fat-tree", "flattened-butterfly", "ring", "torus", "regions")
MOST_LINKS = 100_000
MOST_BYTES = 10_000_000

LINK_KEYS = ("from", "to", "rate", "back", "latency", "loss")


def add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--topology",
        default="switch",
        metavar="NAME|FILE.toml",
        help=f"{', '.join(NAMES)}, or a file that lists links (default: %(default)s)",
    )
    group.add_argument("--latency", default="0", metavar="TIME", help="of a message: 50us, 2ms (default: none)")
    group.add_argument(
        "--bandwidth", default="inf", metavar="RATE", help="of a line: 1gbit, 125MB (default: unlimited)"
    )
    group.add_argument("--down", metavar="RATE", help="of a line, towards the worker (default: as --bandwidth)")
    group.add_argument(
        "--rack",
        type=number_of("workers"),
        metavar="N",
        help="workers of a rack of a fat tree (default: 32), or of a switch of a flattened butterfly (default: 8)",
    )
    group.add_argument(
        "--oversubscription",
        type=float,
        default=4.0,
        metavar="X",
        help="fat tree: what a rack's workers can send together, over what its line to the core carries"
        " (default: %(default)s)",
    )
    group.add_argument(
        "--trunk",
        type=float,
        default=1.0,
        metavar="X",
        help="flattened butterfly: what a link between switches carries, in lines of workers (default: %(default)s)",
    )
    group.add_argument("--core-latency", default="0", metavar="TIME", help="of each link between switches")
    group.add_argument("--regions", type=number_of("regions"), default=2, metavar="N", help="default: %(default)s")
    group.add_argument("--wan-bandwidth", default="inf", metavar="RATE", help="of the line between two regions")
    group.add_argument("--wan-latency", default="0", metavar="TIME", help="of the line between two regions")
    group.add_argument(
        "--slow-link",
        action="append",
        default=[],
        metavar="LINK:4x",
        help='links by name, * stands for anything: "worker 3 *:4x"; may be repeated',
    )
    group.add_argument(
        "--lossy-link",
        action="append",
        default=[],
        metavar="LINK:0.01",
        help='links that lose this share of their packets: "region 0 > 1:0.001"; may be repeated',
    )


def network_of(options: argparse.Namespace) -> "Network":
    """The network that the options describe.

    Raises:
        ConfigError: options that cannot work, a file that says nothing, or a network that does not connect everyone.
    """
    network = _from_file(options) if str(options.topology).endswith(".toml") else _by_name(options)
    changes = _changes(options)
    if not changes:
        return network
    from spardl.simulator.network import Changed

    return Changed(network, changes)


def _by_name(options: argparse.Namespace) -> "Network":
    check_choice("topology", options.topology, NAMES, hint="or name a file that ends in .toml")
    from spardl.simulator import topologies

    line: dict[str, Any] = {
        "workers": options.workers,
        "latency": seconds(options.latency),
        "bandwidth": bytes_per_second(options.bandwidth),
        "down": None if options.down is None else bytes_per_second(options.down),
    }
    core = seconds(options.core_latency)
    makers: dict[str, Callable[[], Network]] = {
        "switch": lambda: topologies.Switch(**line),
        "ring": lambda: topologies.Ring(**line),
        "torus": lambda: topologies.Torus(**line),
        "fat-tree": lambda: topologies.FatTree(
            **line, rack=options.rack or 32, oversubscription=options.oversubscription, core_latency=core
        ),
        "flattened-butterfly": lambda: topologies.FlattenedButterfly(
            **line, rack=options.rack or 8, trunk=options.trunk, core_latency=core
        ),
        "regions": lambda: topologies.Regions(
            **line,
            regions=options.regions,
            wan_bandwidth=bytes_per_second(options.wan_bandwidth),
            wan_latency=seconds(options.wan_latency),
        ),
    }
    return makers[options.topology]()


def _changes(options: argparse.Namespace) -> "list[Change]":
    from spardl.simulator.network import Change

    slow = [Change(*_named(text, "--slow-link")) for text in options.slow_link]
    lossy = [_named(text, "--lossy-link") for text in options.lossy_link]
    return slow + [Change(pattern, loss=share) for pattern, share in lossy]


def _named(text: str, option: str) -> tuple[str, float]:
    """A pattern and a number, such as `worker 3 *:4x`."""
    pattern, colon, number = text.rpartition(":")
    try:
        return pattern, factor(number) if colon and pattern else float("nan/")
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not LINK:NUMBER, such as 'worker 3 *:4x'.") from None


def factor(text: str) -> float:
    """`4x` or `4`."""
    return float(text.removesuffix("x"))


# --- files ----------------------------------------------------------------------------------------------------------


def _from_file(options: argparse.Namespace) -> "Graph":
    from spardl.simulator.graph import Graph, worker_name

    path = str(options.topology)
    found = _load(path)
    unknown = sorted(set(found) - {"workers", "link"})
    if unknown:
        raise ConfigError(f"{path} says {unknown[0]!r}, which is neither `workers` nor a `[[link]]`.")
    workers = found.get("workers", options.workers)
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"{path}: workers = {workers!r} is not a number of workers; give 1 or more.")
    if "workers" not in options.given:
        options.workers = workers
    if workers != options.workers:
        raise ConfigError(f"{path} is a topology of {workers} workers, and --workers says {options.workers}.")
    if workers > 4096:
        raise ConfigError(f"{path}: {workers} workers are more than one process simulates; give 4096 or fewer.")
    links = found.get("link", [])
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        raise ConfigError(f"{path}: links are tables of their own; write each under a line [[link]].")
    names = [worker_name(rank) for rank in range(workers)]
    cables = [cable for place, link in enumerate(links) for cable in _cables(path, place, link, names)]
    if len(cables) > MOST_LINKS:
        raise ConfigError(f"{path} makes {len(cables):,} links, more than {MOST_LINKS:,}; connect fewer.")
    return Graph(workers, cables)


def _load(path: str) -> dict[str, Any]:
    import tomllib

    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes; a topology is shorter.")
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a topology; list links under [[link]].") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from error


def _cables(path: str, place: int, link: dict[str, Any], workers: list[str]) -> "list[Cable]":
    """The cables of one entry, of which a pattern among the workers makes several."""
    from spardl.simulator.graph import Cable

    where = f"{path}: link {place + 1}"
    unknown = sorted(set(link) - set(LINK_KEYS))
    if unknown:
        raise ConfigError(f"{where} has {unknown[0]!r}; a link has {', '.join(LINK_KEYS)}.")
    ends = [_ends(where, link, key, workers) for key in ("from", "to")]
    try:
        details: dict[str, Any] = {
            "rate": bytes_per_second(_text(link, "rate", "inf")),
            "back": bytes_per_second(link["back"]) if "back" in link else None,
            "latency": seconds(_text(link, "latency", "0")),
            "loss": _share(link.get("loss", 0.0)),
        }
        return [Cable(a, b, **details) for a in ends[0] for b in ends[1] if a != b]
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {str(error).rstrip('.')}.") from error


def _ends(where: str, link: dict[str, Any], key: str, workers: list[str]) -> list[str]:
    name = link.get(key)
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where} does not say {key!r} whom it leads; name a node, such as "worker 0".')
    if "*" not in name and "?" not in name:
        return [name]
    found = [worker for worker in workers if fnmatchcase(worker, name)]
    if not found:
        raise ConfigError(f"{where}: no worker is called {name!r}; workers are {workers[0]!r} to {workers[-1]!r}.")
    return found


def _text(link: dict[str, Any], key: str, default: str) -> str:
    value = link.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f'{key} = {value!r} has no unit; write it in quotes, such as "1gbit" or "50us"')
    return value


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"loss = {value!r} is not a share of packets; give 0 to below 1")
    return float(value)
