"""`spardl doctor`."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spardl.cli.findings import Finding, local_findings, one_line
from spardl.cli.options import add_json_option, add_worker_options
from spardl.cli.output import check_target, records, table
from spardl.cli.parser import number_in
from spardl.cli.ranks import run_on_ranks
from spardl.config import SyncConfig
from spardl.errors import SparDLError
from spardl.launch.local import launch
from spardl.launch.place import Place

SUMMARY = "look at this machine, let ranks exchange for a few seconds, and say what is wrong and what to do"

WORKERS = 2
MARKS = {"good": "", "note": "note", "bad": "WRONG"}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("exchange")
    group.add_argument(
        "--seconds",
        type=number_in("--seconds", 0.1, 600),
        default=4.0,
        metavar="S",
        help="that ranks exchange for (default: %(default)g)",
    )
    group.add_argument(
        "--timeout",
        type=number_in("--timeout", 1, 3600),
        default=60.0,
        metavar="S",
        help="that any wait for a rank may take (default: %(default)g)",
    )
    add_json_option(group, "one record per finding")
    add_worker_options(parser, WORKERS)


def run(options: argparse.Namespace) -> int:
    check_target(options.json)
    place = Place.from_environment()
    if place is None:
        found = [*local_findings(), *_on_local_ranks(options)]
    elif place.listener is not None or place.rank != 0:
        found = _exchange(options)  # the launcher, or rank 0, shows it
        _write(found, options.json if place.rank == 0 else None)
        return 0
    else:
        found = [*local_findings(), *_exchange_or_say_why_not(options)]
    _write(found, options.json)
    if options.json != "-":
        _show(found)
    return 1 if any(finding.verdict == "bad" for finding in found) else 0


def _on_local_ranks(options: argparse.Namespace) -> list[Finding]:
    """Start ranks of this very command, which leave what they found in a file."""
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="spardl-doctor-") as folder:
        file = Path(folder) / "findings.jsonl"
        command = [sys.executable, "-P", "-m", "spardl", *options.arguments, "--json", str(file)]
        code = launch(command, options.workers or WORKERS, said.append, port=options.port)
        found = [Finding(**json.loads(line)) for line in _lines(file)]
    if code:
        found.append(_no_exchange(" ".join(" ".join(said).split())))
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _exchange_or_say_why_not(options: argparse.Namespace) -> list[Finding]:
    try:
        return _exchange(options)
    except SparDLError as error:
        return [_no_exchange(one_line(error))]


def _exchange(options: argparse.Namespace) -> list[Finding]:
    """As one rank of several."""
    found: list[Finding] = []

    def examine(_place: Place) -> None:
        from spardl.cli.trial import trial_findings

        found.extend(trial_findings(options.seconds, options.timeout))

    run_on_ranks(options, [SyncConfig(timeout=options.timeout)], examine)
    return found


def _no_exchange(reason: str) -> Finding:
    advice = "cure what is wrong above first; examples/two_machines.md has what usually stands between two machines."
    return Finding("exchange", "bad", f"ranks could not exchange anything: {reason}", advice)


def _write(found: Sequence[Finding], target: str | None) -> None:
    with records(target) as write:
        for finding in found:
            write(finding.to_dict())


def _show(found: Sequence[Finding]) -> None:
    rows = [(each.topic, MARKS[each.verdict], _sentences(each)) for each in found]
    table("What spardl finds here", ("about", "", "what was found, and what to do"), rows, figures=False)
    print(conclusion(found))


def _sentences(finding: Finding) -> str:
    parts = filter(None, [finding.text, finding.advice])
    return " ".join(part[:1].upper() + part[1:] for part in parts)


def conclusion(found: Sequence[Finding]) -> str:
    """One sentence for all of it."""
    bad = sum(finding.verdict == "bad" for finding in found)
    notes = sum(finding.verdict == "note" for finding in found)
    better = f"{notes} could be better" if notes else "nothing needs attention"
    if bad:
        return f"{bad} of {len(found)} things looked at {'does' if bad == 1 else 'do'} not work."
    return f"All {len(found)} things looked at work; {better}."
