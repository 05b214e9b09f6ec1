"""`python -m benchmarks.fuzz`: a table of targets and outcomes; exit code 1 if anything was found.

Compiled loops are compiled once more, with bounds checks, into a folder of their own: what would read or write outside
of an array is an IndexError then, and a finding.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

CHECKED = "NUMBA_BOUNDSCHECK"


def main() -> int:
    options = _options()
    if os.environ.get(CHECKED) != "1":
        changes = {CHECKED: "1", "NUMBA_CACHE_DIR": str(Path(__file__).parent / ".compiled")}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.fuzz", *sys.argv[1:]], os.environ | changes)
    from benchmarks.fuzz.run import RIGHT, Tally, attempt, chosen, made_of, try_all, try_known

    targets = made_of(options.only)
    if options.case is not None:
        target, data, chance = chosen(targets, options.seed, options.case)
        sys.stdout.write(f"{target.name}: {data!r}\n{attempt(target, data, chance)}\n")
        return 0
    tally, started = Tally(), time.monotonic()
    try_known(targets, tally)
    done = try_all(targets, options.seed, options.cases, options.seconds, tally)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{done:,} cases, seed {options.seed}, in {seconds:.0f} s.\n\n")
    outcomes = sorted({outcome for _, outcome in tally.counts}, key=lambda name: (name != RIGHT, name))
    lines = [["target", *outcomes], ["---"] * (1 + len(outcomes))]
    for name in dict.fromkeys(target.name for target in targets):
        lines.append([name, *(f"{tally.counts[name, outcome]:,}" for outcome in outcomes)])
    sys.stdout.write("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    sys.stdout.writelines(f"{finding}\n" for finding in tally.findings)
    return 1 if tally.foul else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="or for how long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), metavar="TARGET", help="these targets alone")
    parser.add_argument("--case", type=int, help="try this case again, and show it; with the same --seed and --only")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
