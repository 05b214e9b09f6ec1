"""A synchronisation method of one's own, in one file. docs/write-a-method.md goes through it line by line.

    python examples/new_method.py

Every worker sends what reaches a threshold of its own, to everybody. After each step the threshold moves a little, so
that about k entries reach it: no sorting, and no agreement on the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spardl.choices import is_number, setting
from spardl.collectives.bruck import gather_blocks
from spardl.collectives.method import About, NoOptions, Seat
from spardl.collectives.price import Price
from spardl.collectives.program import Program
from spardl.collectives.snapshot import Snapshot
from spardl.errors import ConfigError
from spardl.memory.layout import BlockLayout, entries

if TYPE_CHECKING:  # these need torch, which `spardl --help` does without
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks


def check_gain(name: str, given: Any) -> None:
    if not (is_number(given) and 0 < given < 1):
        raise ConfigError(f"{name}={given!r} is no share of the threshold; give a number between 0 and 1.")


@dataclass(frozen=True)
class AdaptiveOptions(NoOptions):
    gain: float = setting(0.05, "share by which the threshold moves after each step", check=check_gain, metavar="SHARE")


class Adaptive:
    """ceil(log2 P) rounds; each worker sends about k (P - 1) entries, at most twice as many. Loses nothing."""

    about: ClassVar[About] = About(
        paper="an example",
        rounds=Price("ceil(log2(P))"),
        entries=Price("0", "2*k*(P-1)"),
        note="about k (P-1) once the threshold has settled",
    )
    Options: ClassVar[type[NoOptions]] = AdaptiveOptions

    def __init__(self, seat: Seat) -> None:
        assert isinstance(seat.options, AdaptiveOptions)
        self.team = seat.team
        self.layout = BlockLayout.contiguous(seat.length, 1)
        self.gain = seat.options.gain
        self.threshold = 0.0  # not known yet

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        target = entries(density, self.layout.length)
        limits = np.full(self.team.size, min(2 * target, self.layout.length))
        if self.threshold == 0.0:
            self.threshold = memory.survey.magnitude_of(target)
        taken = memory.take_above_of_all(self.threshold, int(limits[0]))
        self.threshold *= 1 + self.gain if len(taken) > target else 1 - self.gain

        mine = memory.frames.code(taken)
        pieces = yield from gather_blocks(self.team, memory.frames, mine, np.zeros_like(limits), limits)
        return memory.algebra.sum([piece.decode() for piece in pieces])

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.threshold = Snapshot("Adaptive", state).number("threshold", least=0.0)


if __name__ == "__main__":
    import spardl

    spardl.register_method("adaptive", "__main__:Adaptive")
    for workers in (2, 4, 8, 16):
        report = spardl.simulate(workers=workers, elements=100_000, method="adaptive", density=0.01, gain=0.1, steps=20)
        sent = f"{report.rounds} rounds, {report.bytes_sent_max:,} bytes"
        print(f"{workers} workers: {sent}, nothing lost: {report.conserved}")
