"""Predicted against measured: the simulator, held against emulated networks. Needs root.

    python -m benchmarks.prediction --picture docs/pictures/prediction.png      all of it, about 10 minutes
    python -m benchmarks.prediction --hosts 4 --json four.json                  some hosts only
    python -m benchmarks.prediction --read two.json four.json eight.json        what was measured before

On each number of hosts every method is timed on lines of each rate, and once on unlimited lines. The prediction for a
rate is the simulator's time on a switch with lines of that rate, plus what a step takes on unlimited lines: computing,
which is serialised where hosts share cores, and what the hosts' own network stacks cost. Nothing of a measurement at
a rate enters its prediction. What is simulated are the very steps that are timed, with gradients of the same
distribution: where thresholds are reused, as in Ok-Topk, both decide how much is sent.

What a line of the laboratory is, beside its rate: a TCP segment of 1448 bytes takes 1514, every second one that comes
is answered by 66 bytes on the way back, and after a pause a token bucket lets its burst pass at once.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.netlab.network import burst, bytes_per_second
from spardl.bench.contestants import Ours
from spardl.cli.output import as_rate, as_seconds, table
from spardl.config import SyncConfig
from spardl.simulator.simulation import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("dense", "spardl", "topka", "gtopk", "oktopk")
HOSTS, RATES = (2, 4, 8), ("10mbit", "100mbit", "1gbit")
ELEMENTS, DENSITY = 1_000_000, 0.01
SEGMENT, FRAME, ANSWER = 1448, 1514, 66
WARM_UP, REPETITIONS = 1, 5  # turns of the bench that do not count, and those that do
CLOSE = 0.05  # methods whose measured times differ by less than this share have no ranking, however little they scatter
MOST_ERROR = 0.15


class Normal:
    """Gradients as the bench has them: normal numbers, of which none are common to two ranks or steps."""

    def fill(self, step: int, rank: int, first: int, out: Tensor) -> None:
        generator = torch.Generator().manual_seed((step * max(HOSTS) + rank) * ELEMENTS + first)
        torch.randn(out.numel(), generator=generator, out=out)


@dataclass(frozen=True)
class Case:
    """One method on so many hosts with lines of one rate: seconds of a synchronisation, measured and predicted.

    measured_s are the lower quartile, upper_s the upper one of the same repetitions: what lies between is their spread.
    """

    hosts: int
    rate: str
    method: str
    measured_s: float
    predicted_s: float
    upper_s: float = 0.0

    def is_clearly_below(self, other: "Case") -> bool:
        """Whether it was quicker by more than the measurements scatter."""
        return max(self.measured_s * (1 + CLOSE), self.upper_s) < other.measured_s

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def main() -> None:
    options = parser().parse_args()
    if options.read:
        cases = [Case(**record) for path in options.read for record in json.loads(Path(path).read_text("utf-8"))]
    else:
        torch.set_num_threads(1)
        cases = [case for hosts in options.hosts for case in compare(hosts, options.rates, options.repetitions)]
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(case) for case in cases], indent=1), "utf-8")
    show(cases)
    if options.picture:
        draw(cases).savefig(options.picture, dpi=150)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--hosts", type=_numbers, default=HOSTS, metavar="N,N", help="default: 2,4,8")
    made.add_argument("--rates", type=lambda text: text.split(","), default=RATES, help="default: 10mbit,100mbit,1gbit")
    made.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N", help="default: %(default)s")
    made.add_argument("--json", metavar="FILE")
    made.add_argument("--picture", metavar="FILE")
    made.add_argument("--read", nargs="+", metavar="FILE", help="show what --json has written, without measuring")
    return made


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def compare(hosts: int, rates: Sequence[str], repetitions: int) -> list[Case]:
    """All methods on so many hosts, at all rates."""
    computing = measure(hosts, None, 4 * repetitions)
    found = []
    for rate in rates:
        measured = measure(hosts, rate, repetitions)
        found += [
            Case(
                hosts,
                rate,
                method,
                measured[method][0],
                computing[method][0] + line_seconds(method, hosts, rate, repetitions),
                measured[method][1],
            )
            for method in METHODS
        ]
    return found


def measure(hosts: int, rate: str | None, repetitions: int) -> dict[str, tuple[float, float]]:
    """Seconds of a synchronisation by method, of the slowest rank, on emulated hosts: quartiles.

    The lower one counts: whatever else the machine does only ever adds.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "bench.json"
        bench = ["spardl", "bench", "--elements", str(ELEMENTS), "--density", str(DENSITY), "--json", str(target)]
        bench += ["--methods", ",".join(METHODS), "--repetitions", str(repetitions), "--warmup", str(WARM_UP)]
        lab = ["-m", "benchmarks.netlab", "--hosts", str(hosts), *(["--rate", rate] if rate else []), "--"]
        done = subprocess.run([sys.executable, *lab, *bench], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the measurement on {hosts} hosts failed:\n{done.stderr.strip()}")
        records = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    return {record["method"]: (record["quartiles_s"][0], record["quartiles_s"][-1]) for record in records}


def line_seconds(method: str, hosts: int, rate: str, repetitions: int = REPETITIONS) -> float:
    """What the simulator says that the lines take in the steps that are timed, on average."""
    config = SyncConfig(method=method, density=DENSITY, dense_below=0)
    bandwidth = bytes_per_second(rate) * SEGMENT / (FRAME + ANSWER / 2)

    def seconds(steps: int) -> float:
        """Of so many steps, from the first one on."""
        given: dict[str, Any] = {"bandwidth": bandwidth, "gradients": Normal(), "steps": steps}
        return simulate(workers=hosts, elements=ELEMENTS, config=config, **given).time_s * steps

    before = Ours.settles + WARM_UP
    # Of dense, one step is like another.
    line = seconds(1) if method == "dense" else (seconds(before + repetitions) - seconds(before)) / repetitions
    return max(0.0, line - burst(rate) / bytes_per_second(rate))


Pair = tuple[Case, Case]


def pairs_of(cases: Sequence[Case]) -> list[Pair]:
    """Two methods in the same setting each, of which the first was measured to be the quicker one."""
    return [
        (first, second)
        for first in cases
        for second in cases
        if (first.hosts, first.rate) == (second.hosts, second.rate) and first.measured_s < second.measured_s
    ]


def ranked(cases: Sequence[Case]) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Pairs of methods that are ranked alike, those that are swapped, and those that measurements do not rank.

    Where the measured times of two methods differ by less than they scatter, a repetition may rank them otherwise.
    """
    alike: list[Pair] = []
    swapped: list[Pair] = []
    ties: list[Pair] = []
    for first, second in pairs_of(cases):
        right = first.predicted_s < second.predicted_s
        place = ties if not first.is_clearly_below(second) else alike if right else swapped
        place.append((first, second))
    return alike, swapped, ties


def show(cases: Sequence[Case]) -> None:
    rows = [
        (
            f"{case.hosts} hosts, {as_rate(bytes_per_second(case.rate))}",
            case.method,
            as_seconds(case.measured_s),
            as_seconds(case.predicted_s),
            f"{100 * (case.predicted_s / case.measured_s - 1):+.0f} %",
        )
        for case in cases
    ]
    median = statistics.median(case.error for case in cases)
    alike, swapped, ties = ranked(cases)
    best = _winners_agree(cases)
    note = (
        f"median error {100 * median:.1f} % (at most {100 * MOST_ERROR:.0f} % wanted), largest"
        f" {100 * max(case.error for case in cases):.0f} %; of {len(alike) + len(swapped)} pairs of methods that differ"
        f" by more than they scatter {len(alike)} are ranked alike, {len(ties)} others are ties; the fastest method is"
        f" the one predicted in {sum(best)} of {len(best)} settings."
    )
    table("one synchronisation", ("setting", "method", "measured", "predicted", "error"), rows, note=note)
    if swapped:
        title = "pairs that were predicted the other way round"
        table(title, ("setting", "quicker as measured", "slower"), [_row(*pair) for pair in swapped])


def _row(first: Case, second: Case) -> tuple[str, str, str]:
    setting = f"{first.hosts} hosts, {as_rate(bytes_per_second(first.rate))}"
    return (
        setting,
        *(f"{each.method}: {_between(each)}, predicted {as_seconds(each.predicted_s)}" for each in (first, second)),
    )


def _between(case: Case) -> str:
    """Measured, with its spread where that is known."""
    return as_seconds(case.measured_s) + (f" to {as_seconds(case.upper_s)}" if case.upper_s else "")


def _winners_agree(cases: Sequence[Case]) -> list[bool]:
    """By setting, whether what is predicted to be fastest is, or is as fast as the fastest."""
    found = []
    for setting in dict.fromkeys((case.hosts, case.rate) for case in cases):
        own = [case for case in cases if (case.hosts, case.rate) == setting]
        chosen = min(own, key=lambda case: case.predicted_s)
        found.append(chosen.measured_s <= min(case.measured_s for case in own) * (1 + CLOSE))
    return found


def _hosts(cases: Sequence[Case]) -> str:
    return ", ".join(str(hosts) for hosts in sorted({case.hosts for case in cases}))


def draw(cases: Sequence[Case]) -> "Figure":
    """Predicted over measured, both logarithmic, with the band of 15 %."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from spardl.cli.curves import INK, MARKERS, PALETTE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        axes = figure.subplots()
        ends = [min(case.measured_s for case in cases) / 1.5, max(case.measured_s for case in cases) * 1.5]
        axes.plot(ends, ends, color=INK, linewidth=1)
        axes.fill_between(
            ends,
            [(1 - MOST_ERROR) * end for end in ends],
            [(1 + MOST_ERROR) * end for end in ends],
            color=INK,
            alpha=0.1,
        )
        for place, method in enumerate(METHODS):
            for size, hosts in zip((25, 45, 70), HOSTS, strict=True):
                own = [case for case in cases if case.method == method and case.hosts == hosts]
                axes.scatter(
                    [case.measured_s for case in own],
                    [case.predicted_s for case in own],
                    s=size,
                    color=PALETTE[place],
                    marker=MARKERS[place],
                    alpha=0.8,
                    label=method if hosts == HOSTS[-1] else None,
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("measured (s)")
        axes.set_ylabel("predicted (s)")
        axes.set_title(
            f"one synchronisation on {_hosts(cases)} hosts (more hosts, larger marks)", loc="left", fontsize="medium"
        )
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
