"""Does the choice hold? What `spardl plan` and method="auto" pick, against every candidate, measured step by step.

    python -m benchmarks.choice                                       # all settings, about half an hour; needs root
    python -m benchmarks.choice --rate 100mbit --elements 1e6         # one of them
    python -m benchmarks.choice --show                                # the table of what was measured before

Four emulated hosts (`benchmarks.netlab`), a line of the given rate each, and stacks of linear layers of three sizes. In
one run per setting, plan first picks a way; then dense (DDP as it is), candidates at 1 %, the pick and auto train side
by side, each on its own copy of the model, a few steps of each in turn, whoever begins; a step takes as long as on the
slowest rank. A dense step of 15 million elements over 10 Mbit/s takes more than a minute, and is taken once.

The quickest of several noisy times is quicker than it should be. So the best candidate is found in every other turn,
and timed against the pick in the turns between; once each way round, and the mean of the two ratios is what counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import spardl
from spardl.cli.output import as_ratio, as_seconds, table
from spardl.integrations.auto import AutoSync
from spardl.integrations.contest import Contest
from spardl.integrations.rehearsal import rehearse
from spardl.planning.review import LONGEST_RACE

RESULTS = Path(__file__).parent / "results" / "choice.json"
RATES = ("10mbit", "100mbit", "1gbit", "unlimited")
SIZES = {"1e5": (128, 6), "1e6": (512, 4), "15e6": (1024, 14)}  # elements: width and number of layers
HOSTS = 4
BATCH = 8
DENSITY = 0.01
DENSE = "dense"
CANDIDATES: dict[str, dict[str, Any]] = {
    "spardl, 2 teams": {"method": "spardl", "teams": 2},
    "spardl, 4 teams": {"method": "spardl", "teams": 4},
    "topka": {"method": "topka"},
    "gtopk": {"method": "gtopk"},
}
AUTO, PLANNED = "auto", "planned"
WARM_UP = 3
STEPS = 3  # in a turn
LEAST_TURNS, MOST_TURNS = 4, 60
SECONDS = 20.0  # for all turns
SLOW_S = 5.0  # a step that takes longer has no more than one turn of one step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", choices=RATES, help="of every line; default: all of them")
    parser.add_argument("--elements", choices=tuple(SIZES), help="of the model; default: all sizes")
    parser.add_argument("--show", action="store_true", help="print what was measured before, and measure nothing")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        measure(options)
        return
    if not options.show:
        for rate in [options.rate] if options.rate else RATES:
            for elements in [options.elements] if options.elements else SIZES:
                keep(run(rate, elements))
    show(load())


def run(rate: str, elements: str) -> dict[str, Any]:
    """One setting, on hosts of its own."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "record.json"
        line = [] if rate == "unlimited" else ["--rate", rate]
        lab = [sys.executable, "-m", "benchmarks.netlab", "--hosts", str(HOSTS), *line, "--"]
        rank = [sys.executable, "-m", "benchmarks.choice", "--as-rank", str(target)]
        subprocess.run([*lab, *rank, "--rate", rate, "--elements", elements], check=True)
        found: dict[str, Any] = json.loads(target.read_text())
        return found


# --- on a rank ------------------------------------------------------------------------------------------------------


class Way:
    """One way to train, with its own copy of the model."""

    def __init__(self, size: str, settings: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        width, layers = SIZES[size]
        stack = nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())))
        # Every copy is the same already: sending it over 10 Mbit/s would take longer than all else.
        self.model = DistributedDataParallel(stack, init_sync=False)
        self.optimizer = SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.sync = None
        if settings is not None:
            self.sync = spardl.attach(self.model, optimizer=self.optimizer, density=DENSITY, **settings)
        self.inputs: Tensor = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.seconds: list[float] = []

    def step(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - started


def measure(options: argparse.Namespace) -> None:
    """Plan, then let all ways take turns; rank 0 writes the record."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, started = options.elements, time.perf_counter()
    pick = plan(size)
    planned_after, started = time.perf_counter() - started, time.perf_counter()
    auto = Way(size, {"method": "auto"})
    attached_after = time.perf_counter() - started
    assert isinstance(auto.sync, AutoSync)
    race(auto)
    ways = {DENSE: Way(size, None), **{name: Way(size, settings) for name, settings in CANDIDATES.items()}, AUTO: auto}
    known = next((name for name, settings in CANDIDATES.items() if settings == pick), DENSE if not pick else None)
    if known is None:
        ways[PLANNED] = Way(size, pick)
    take_turns(ways)
    record = {
        "rate": options.rate,
        "elements": size,
        "hosts": dist.get_world_size(),
        "seconds": {name: statistics.median(way.seconds) for name, way in ways.items()},
        "halves": {name: halves(way.seconds) for name, way in ways.items()},
        "turns": {name: len(way.seconds) for name, way in ways.items()},
        "planned": pick or {"method": DENSE},
        "planned_as": known or PLANNED,
        "auto": "dense" if auto.sync.is_dense else auto.sync.config.method,
        "plan_s": planned_after,
        "attach_s": attached_after,
    }
    if dist.get_rank() == 0:
        Path(options.as_rank).write_text(json.dumps(record))
    dist.barrier()


def plan(size: str) -> dict[str, Any]:
    """What `spardl plan` would say of this model here, as settings; none for dense."""

    def body() -> None:
        way = Way(size, None)
        while True:
            way.step()

    contest = Contest(spardl.SyncConfig(density=DENSITY))
    rehearse(body, contest)
    best, _, _ = contest.result()
    if best.candidate.is_dense:
        return {}
    settings = best.candidate.settings()
    settings.pop("density")
    return settings


def race(auto: Way) -> None:
    """Train until auto has decided; all ranks take as many steps."""
    for _ in range(LONGEST_RACE):
        auto.step()
        review = auto.sync._review  # type: ignore[union-attr]
        if review is None or review.settled is not None:
            break


def take_turns(ways: dict[str, Way]) -> None:
    """As many turns as there is time for; the times are those of the slowest rank."""
    slow = set()
    for name, way in ways.items():
        first = _slowest([way.step()])[0]
        if first > SLOW_S:
            slow.add(name)
            way.seconds = [first]
        else:
            for _ in range(WARM_UP - 1):
                way.step()
    quick = {name: way for name, way in ways.items() if name not in slow}
    once = sum(_slowest([way.step() for way in quick.values()])) * STEPS
    turns = int(min(MOST_TURNS, max(LEAST_TURNS, SECONDS / once)))
    order = list(quick.values())
    for turn in range(turns):
        first = turn % len(order)  # what came before leaves caches and queues behind: for someone else in each turn
        for way in [*order[first:], *order[:first]]:
            dist.barrier()
            way.seconds += [way.step() for _ in range(STEPS)]
    for way in quick.values():
        way.seconds = _slowest(way.seconds)


def halves(seconds: list[float]) -> list[float]:
    """Medians of every other turn and of the turns between; of a step that was taken once, that one."""
    turns = [seconds[first : first + STEPS] for first in range(0, len(seconds), STEPS)]
    parts = [[step for turn in turns[start::2] for step in turn] for start in (0, 1)]
    return [statistics.median(part or seconds) for part in parts]


def of_the_best(record: dict[str, Any]) -> float:
    """What the pick takes, times the best candidate, which is found in one half of the turns and timed in the other."""
    whole = {name: [taken, taken] for name, taken in record["seconds"].items()}
    times = {name: taken for name, taken in record.get("halves", whole).items() if name != AUTO}
    picked = times[record["planned_as"]]
    ratios = []
    for found, timed in ((0, 1), (1, 0)):
        best = min(times.values(), key=lambda pair: pair[found])
        ratios.append(picked[timed] / best[timed])
    return statistics.mean(ratios)


def noise(record: dict[str, Any]) -> float | None:
    """The largest share by which a candidate differs from itself, between the two halves of its turns."""
    found = [max(pair) / min(pair) - 1 for pair in record.get("halves", {}).values()]
    return max(found) if found else None


def _slowest(seconds: list[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    result: list[float] = found.tolist()
    return result


# --- records --------------------------------------------------------------------------------------------------------


def load() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep(record: dict[str, Any]) -> None:
    """Beside the records of other settings, instead of an older one of this."""
    others = [each for each in load() if (each["rate"], each["elements"]) != (record["rate"], record["elements"])]
    order = {(rate, size): place for place, (rate, size) in enumerate((r, s) for r in RATES for s in SIZES)}
    found = sorted([*others, record], key=lambda each: order[each["rate"], each["elements"]])
    RESULTS.write_text("".join(json.dumps(each) + "\n" for each in found))


def show(found: list[dict[str, Any]]) -> None:
    rows = []
    for each in found:
        seconds = each["seconds"]
        measured = {name: taken for name, taken in seconds.items() if name != AUTO}
        best = min(measured, key=lambda name: measured[name])
        picked = seconds[each["planned_as"]]
        shown = each["planned"]["method"] if each["planned_as"] == PLANNED else each["planned_as"]
        rows.append(
            (
                f"{each['rate']}, {float(each['elements']):,.0f}",
                as_seconds(seconds[DENSE]),
                f"{best}: {as_seconds(measured[best])}",
                f"{shown}: {as_seconds(picked)}",
                f"{of_the_best(each):.2f}",
                f"{each['auto']}: {as_seconds(seconds[AUTO])}",
                f"{seconds[AUTO] / seconds[DENSE]:.2f} ({as_ratio(seconds[DENSE] / seconds[AUTO])})",
                "" if (spread := noise(each)) is None else f"{spread:.0%}",
            )
        )
    table(
        f"Steps of {HOSTS} hosts at a density of {DENSITY:.0%}",
        ("line, elements", "dense", "best measured", "plan picks", "of the best", "auto", "auto, of dense", "noise"),
        rows,
        note="of the best: goal 1.10 or less; of dense: goal 1.05 or less;"
        " noise: the most that a way differs from itself",
    )


if __name__ == "__main__":
    main()
