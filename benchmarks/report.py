"""docs/performance.md from what `python -m benchmarks.suite` has measured; measures nothing itself.

    python -m benchmarks.report

The words are in benchmarks/performance.md, with slots such as {{table sync-4-1gbit}}; here is what fills them. A slot
whose benchmark has not run says so.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import endtoend, kernels
from benchmarks.suite import JOBS, RESULTS
from benchmarks.targets import Results, Target, targets
from spardl.cli.charts import AXES, against, label, save, stacked
from spardl.cli.output import as_bytes, as_percent, as_rate, as_ratio, as_seconds

TEMPLATE = Path("benchmarks/performance.md")
PAGE = Path("docs/performance.md")
SLOT = re.compile(r"\{\{(\w+)(?: ([\w./,-]+))?\}\}")

Record = dict[str, Any]


class Missing(Exception):
    """A benchmark has not run; the text is its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    options = parser.parse_args()
    if not (options.results / "runs.json").exists():
        sys.exit(f"report: there are no results in {options.results}; run `python -m benchmarks.suite` first.")
    results = load(options.results)
    pictures = options.page.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    options.page.write_text(Page(results, options.results, pictures).filled(TEMPLATE.read_text()))
    print(f"{options.page} is made of {len(results.runs)} benchmarks.")


def load(folder: Path) -> Results:
    runs = json.loads((folder / "runs.json").read_text())
    machine = json.loads((folder / "machine.json").read_text())
    known = {job.name for job in JOBS}
    return Results(runs, machine, {name: read(folder / f"{name}.json") for name in runs if name in known})


def read(path: Path) -> list[Record]:
    """One record per line, or one document."""
    text = path.read_text()
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return [json.loads(text)]


class Page:
    """Each method named `slot_...` fills slots of that name."""

    def __init__(self, results: Results, folder: Path, pictures: Path) -> None:
        self._results = results
        self._folder = folder
        self._pictures = pictures

    def filled(self, template: str) -> str:
        return SLOT.sub(self._fill, template)

    def _fill(self, match: re.Match[str]) -> str:
        fill: Callable[..., str] = getattr(self, f"slot_{match[1]}")
        try:
            return fill(match[2]) if match[2] else fill()
        except Missing as missing:
            return f"*Not measured yet: `python -m benchmarks.suite --only {missing}`.*"

    def _records(self, name: str) -> list[Record]:
        if name not in self._results.records:
            raise Missing(name)
        return self._results.records[name]

    # --- words --------------------------------------------------------------------------------------------------

    def slot_machine(self) -> str:
        facts, days = self._results.machine, sorted({run["day"] for run in self._results.runs.values()})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        return (
            f"{facts['cores']} cores of {facts['processor']}, {facts['memory_bytes'] / 2**30:.0f} GiB of memory,"
            f" {facts['system']},\nPython {facts['python']}, torch {facts['torch']}, numpy {facts['numpy']}; {when}"
        )

    def slot_command(self, name: str) -> str:
        if name not in self._results.runs:
            raise Missing(name)
        run = self._results.runs[name]
        return f"```\n{run['command']}\n```\n({run['seconds']:.0f} s)"

    def slot_targets(self) -> str:
        rows = [_target_row(target) for target in targets(self._results)]
        return markdown(("no.", "target", "measured", "limit", "", "if missed, why"), rows, left=(1, 5))

    def slot_winners(self) -> str:
        """Where something else than spardl was fastest, at the same density or without one."""
        found = list(winners(self._results))
        if not found:
            return "Nothing was faster than spardl in any of these runs."
        return markdown(("benchmark", "setting", "spardl", "faster"), found, left=(0, 1, 3))

    # --- tables -------------------------------------------------------------------------------------------------

    def slot_table(self, name: str) -> str:
        records = self._records(name)
        groups: dict[tuple[str, int], list[Record]] = {}
        for record in records:
            groups.setdefault((record["model"], record["elements"]), []).append(record)
        parts = []
        for (model, elements), group in groups.items():
            title = f"{model}, {elements:,} elements" if model else f"{elements:,} elements"
            parts.append((f"**{title}**\n\n" if len(groups) > 1 else "") + bench_table(group))
        return "\n\n".join(parts)

    def slot_kernels(self) -> str:
        records = self._records("kernels")
        rows = [
            (
                f"{record['elements']:,}",
                record["what"],
                as_seconds(record["median_s"]),
                as_seconds(*record["quartiles_s"]),
                as_seconds(record["limit_s"]),
                f"{record['median_s'] / record['limit_s']:.2f}",
                f"{record['times_add']:.2f}" if "times_add" in record else "",
                f"{record['entries_per_s'] / 1e6:.0f}" if "entries_per_s" in record else "",
            )
            for record in records
            if record["what"] not in (kernels.READ, kernels.COPY)
        ]
        columns = (
            "elements",
            "what",
            "median",
            "middle half",
            "limit",
            "x of limit",
            "x numpy.add",
            "million entries/s",
        )
        return markdown(columns, rows, left=(1,))

    def slot_latency(self) -> str:
        (record,) = self._records("latency")
        found = record["seconds"]
        ways = list(dict.fromkeys(way for figures in found.values() for way in figures))
        rows = [(way, *(as_seconds(*each[way]) if way in each else "" for each in found.values())) for way in ways]
        return markdown(("transport", *(f"{workers} ranks" for workers in found)), rows)

    def slot_memory(self) -> str:
        records = self._records("memory")
        rows = [
            (
                str(record["rank"]),
                as_bytes(record["gradient_bytes"]),
                as_bytes(record["peak_bytes"]),
                as_bytes(record["beyond_bytes"]),
                as_bytes(record["limit_bytes"]),
                f"{record['beyond_bytes'] / record['limit_bytes']:.2f}",
                as_seconds(record["seconds"][-1]),
            )
            for record in records
        ]
        columns = ("rank", "gradient", "peak in all", "beyond the gradient", "limit", "x of limit", "one step")
        return markdown(columns, rows)

    def slot_training(self, name: str) -> str:
        records = self._records(name)
        rows = [
            (
                record["way"],
                f"{record['steps_per_s']:.2f}",
                as_seconds(record["median_s"]),
                as_seconds(*record["quartiles_s"]),
                as_seconds(record["limit_s"]),
                f"{record['times_limit']:.2f}",
                "" if record["way"] == endtoend.DENSE else as_ratio(record["speedup_vs_dense"]),
            )
            for record in records
        ]
        columns = ("synchronisation", "steps/s", "time per step", "middle half", "limit", "x of limit", "against dense")
        return f"{endtoend.title(records)}:\n\n" + markdown(columns, rows)

    def slot_overlap(self) -> str:
        (record,) = self._records("overlap")
        rows = [
            (
                way["way"],
                str(way["groups"]),
                as_seconds(way["median_s"]),
                as_seconds(*way["quartiles_s"]),
                as_seconds(way["predicted_s"]),
                as_seconds(way["limit_s"]),
                f"{way['median_s'] / way['limit_s']:.2f}",
            )
            for way in record["ways"]
        ]
        columns = ("synchronisation", "groups", "time per step", "middle half", "predicted", "limit", "x of limit")
        return markdown(columns, rows)

    # --- pictures -----------------------------------------------------------------------------------------------

    def slot_parts(self, name: str) -> str:
        target = f"parts-{name}.png"
        save(stacked(self._records(name)), str(self._pictures / target))
        return f"![Where the time of a step goes](pictures/{target})"

    def slot_over(self, what: str) -> str:
        """`what` is an axis and, after commas, the benchmarks that vary it."""
        key, *names = what.split(",")
        axis, target = AXES[key], f"time-over-{key.removesuffix('_s')}.png"
        records = [record for name in names for record in self._records(name)]
        few = {record["method"] for name in names[-1:] for record in self._records(name)}
        shown = [record for record in records if record["method"] in few]
        save(against(shown, axis), str(self._pictures / target))
        return f"![Time against {axis.name}](pictures/{target})"

    def slot_steps(self, name: str) -> str:
        target = f"{name}.png"
        endtoend.draw(self._records(name), str(self._pictures / target))
        return f"![Training steps per second](pictures/{target})"

    def slot_drawn(self, name: str) -> str:
        """A picture that the benchmark itself has drawn."""
        self._records(name)
        target = f"{name}.png"
        shutil.copyfile(self._folder / target, self._pictures / target)
        return f"![{self._results.runs[name]['title']}](pictures/{target})"


def bench_table(records: Sequence[Record]) -> str:
    fastest = min(record["median_s"] for record in records)
    several = len({record["density"] for record in records if record["density"] < 1}) > 1
    rows = []
    for record in records:
        median = as_seconds(record["median_s"])
        name = label(record) + (f", {as_percent(record['density'])}" if several and record["density"] < 1 else "")
        rows.append(
            (
                name,
                f"**{median}**" if record["median_s"] == fastest else median,
                as_seconds(*record["quartiles_s"]),
                as_seconds(record["limit_s"]),
                f"{record['times_limit']:.1f}",
                str(record["rounds"]),
                as_bytes(record["bytes_sent"]),
                "" if record["method"] == "dense" else as_ratio(record["speedup_vs_dense"]),
            )
        )
    return markdown(
        ("method", "median", "middle half", "limit", "x of limit", "rounds", "sent by one", "against dense"), rows
    )


def winners(results: Results) -> Iterable[tuple[str, ...]]:
    for name, records in results.records.items():
        for ours in records:
            if ours.get("method") != "spardl" or ours.get("values") != "bf16":
                continue
            others = [
                other
                for other in records
                if other["elements"] == ours["elements"]
                and other["density"] in (ours["density"], 1.0)
                and other["method"] != "spardl"
                and other["median_s"] < ours["median_s"]
            ]
            others.sort(key=lambda other: float(other["median_s"]))
            if others:
                by = ", ".join(f"{label(other)} {ours['median_s'] / other['median_s']:.2f}x" for other in others)
                yield name, setting(ours), as_seconds(ours["median_s"]), by


def setting(record: Record) -> str:
    parts = [f"{record['elements']:,} elements", as_percent(record["density"]), f"{record['workers']} hosts"]
    if record["rate"]:
        parts.append(as_rate(record["rate"]))
    if record["latency_s"]:
        parts.append(f"{as_seconds(record['latency_s'])} latency")
    return ", ".join(parts)


def _target_row(target: Target) -> tuple[str, ...]:
    if target.measured is None:
        return target.number, target.text, "not measured", "", "", ""
    verdict = "met" if target.met else "**missed**"
    return target.number, target.text, target.measured, target.limit, verdict, "" if target.met else target.reason


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table; columns other than `left` hold figures."""
    marks = ["---" if position in left else "---:" for position in range(len(columns))]
    lines = [columns, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
