"""Cases by number: each is made from the seed and its number alone, so that any of them can be tried again."""

import os
import random
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path

from benchmarks.fuzz.targets import TARGETS, Target

BATCH = 5000  # cases per process: a crash ends only that
LONGEST_S = 60.0  # that a case may take
LOOK_S = 0.01
MEMORY = 6 << 30  # bytes that a process may have: what asks for more does not check what it reads
REMEMBERED = 5  # findings of a kind told in full

RIGHT, REFUSED = "read", "refused"


@dataclass
class Tally:
    """How often each target has come to what, and what must not be."""

    counts: "Counter[tuple[str, str]]" = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def note(self, target: str, outcome: str, finding: str = "") -> None:
        self.counts[target, outcome] += 1
        if finding and self.counts[target, outcome] <= REMEMBERED:
            self.findings.append(finding)

    @property
    def foul(self) -> int:
        return sum(count for (_, outcome), count in self.counts.items() if outcome not in (RIGHT, REFUSED))


def made_of(names: Sequence[str] = ()) -> list[Target]:
    """The targets of these names; of all, if none is given."""
    return [kind() for kind in TARGETS if not names or kind.name in names]


def chosen(targets: Sequence[Target], seed: int, number: int) -> tuple[Target, bytes, random.Random]:
    """The case of this number."""
    chance = random.Random((seed << 40) + number)
    target = chance.choices(targets, [each.weight for each in targets])[0]
    return target, target.case(chance), chance


def attempt(target: Target, data: bytes, chance: random.Random) -> tuple[str, str]:
    """What comes of these bytes: one of RIGHT and REFUSED, or the name of what was raised and where."""
    try:
        target.read(data, chance)
    except Exception as error:
        if target.refuses(error):
            return REFUSED, ""
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return type(error).__name__, f"{target.name}: {type(error).__name__} at {place}: {str(error)[:200]}"
    return RIGHT, ""


def try_known(targets: Sequence[Target], tally: Tally) -> None:
    """Samples as they are, and the kept corpus."""
    for target in targets:
        for data in target.known:
            tally.note(target.name, *attempt(target, data, random.Random(0)))


def try_all(targets: Sequence[Target], seed: int, cases: int, seconds: float, tally: Tally) -> int:
    """Cases 0, 1, ... in processes of their own; how many there was time for."""
    deadline, done = time.monotonic() + seconds, 0
    while done < cases and time.monotonic() < deadline:
        stop = min(cases, done + BATCH)
        done = _batch(targets, seed, done, stop, deadline, tally)
    return done


def _batch(targets: Sequence[Target], seed: int, first: int, stop: int, deadline: float, tally: Tally) -> int:
    """Cases of one process; the number of the next one to try."""
    reached = mmap(-1, 8)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as diary:
        pid = os.fork()
        if not pid:
            _child(targets, seed, first, stop, deadline, reached, diary.fileno())
        watched = _watch(pid, reached)
        diary.seek(0)
        for line in diary.read().splitlines():
            name, outcome, finding = line.split("\t", 2)
            tally.note(name, outcome, finding)
    number = int.from_bytes(reached[:8])
    if watched == 0:
        return number
    target, _, _ = chosen(targets, seed, number)
    how = "hang" if watched == -1 else f"signal {watched}"
    tally.note(target.name, how, f"{target.name}: {how} in case {number}")
    return number + 1


def _watch(pid: int, reached: mmap) -> int:
    """0 when the process has ended by itself; the signal that ended it, or -1 if it did not come on.

    Looks are counted, not seconds: who was stopped for a while, with all its children, has not waited.
    """
    seen, looks = b"", 0
    while looks * LOOK_S < LONGEST_S:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        looks = looks + 1 if reached[:8] == seen else 0
        seen = reached[:8]
        time.sleep(LOOK_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def _child(
    targets: Sequence[Target], seed: int, first: int, stop: int, deadline: float, reached: mmap, diary: int
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for number in range(first, stop):
            reached[:8] = number.to_bytes(8)
            if time.monotonic() > deadline:
                break
            target, data, chance = chosen(targets, seed, number)
            outcome, finding = attempt(target, data, chance)
            if finding:
                finding = f"case {number}: {finding}".replace("\t", " ").replace("\n", " ")
            os.write(diary, f"{target.name}\t{outcome}\t{finding}\n".encode())
        else:
            reached[:8] = stop.to_bytes(8)
    finally:
        os._exit(0)
