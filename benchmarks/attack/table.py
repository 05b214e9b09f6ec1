"""What was found, as a table of kinds and outcomes, and in the page about trust."""

from collections import Counter
from pathlib import Path

from benchmarks.attack.plan import KINDS
from benchmarks.attack.trial import COUNTED, FINE, FOUL, Finding

ALWAYS = ("retried", "hang", "wrong name", "failed before the fault")  # columns that are shown when they are empty too
BEGIN, END = "<!-- attack: begin -->", "<!-- attack: end -->"


def table(findings: list[Finding]) -> str:
    """A row for each kind that was tried, in Markdown; columns of outcomes that nobody had are left out,
    but for those of `ALWAYS`."""
    total = sum((each.counts for each in findings), Counter[str]())
    columns = [what for what in (*FINE, *COUNTED, *FOUL) if total[what] or what in ALWAYS]
    rows = [["fault", "trials", *columns]]
    for kind in KINDS:
        mine = [each for each in findings if each.trial.kind == kind.name]
        if mine:
            counts = sum((each.counts for each in mine), Counter[str]())
            rows.append([kind.name, str(len(mine)), *(str(counts[what]) for what in columns)])
    rows.append(["all", str(len(findings)), *(str(total[what]) for what in columns)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def page(findings: list[Finding], path: Path, hosts: bool) -> str:
    """The page at this path with the table of these findings between its marks."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    seeds = [each.trial.seed for each in findings]
    where = "each rank on a host of its own (a network namespace)" if hosts else "all ranks on one host"
    timeout = findings[0].trial.timeout
    how = f"{len(findings)} trials, seeds {min(seeds)} to {max(seeds)}, {where}, timeout {timeout:g} s, 3 or 4 ranks."
    seconds = sum(each.seconds for each in findings)
    how += f" They took {seconds / 60:.0f} minutes. Counts are of ranks."
    return f"{before}{BEGIN}\n{how}\n\n{table(findings)}\n{END}{after}"
