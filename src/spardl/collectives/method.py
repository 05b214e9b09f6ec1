"""What every method offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from spardl.choices import check_settings, setting
from spardl.collectives.price import Price
from spardl.collectives.program import Program, Team, ranks_from
from spardl.memory.layout import BlockLayout

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks


@dataclass(frozen=True, slots=True)
class About:
    """What `spardl methods` prints, and tests hold the method to.

    paper      where it was published
    rounds     on the rank that takes most of them, in a settled step
    entries    that the rank which sends most of them sends; of a dense method without indices
    note       what the formulas leave out
    dense      its result is every entry, and nothing waits
    by_blocks  it touches blocks one after another, so that some can be added up while others travel
    """

    paper: str
    rounds: Price
    entries: Price
    note: str = ""
    dense: bool = False
    by_blocks: bool = False


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none. Others derive from it: fields made by `choices.setting`, checked."""

    def __post_init__(self) -> None:
        check_settings(self)

    def check_for(self, workers: int) -> None:
        """Raise `ConfigError` if these options cannot work with so many workers."""


@dataclass(frozen=True)
class BlockOptions(NoOptions):
    """Options of methods that deal the vector out to blocks of equal length."""

    blocks: str = setting(
        "interleaved",
        "interleaved: each block samples all layers; contiguous: stretches of the vector, as in the paper",
        choices=("interleaved", "contiguous"),
    )

    def layout(self, length: int, count: int) -> BlockLayout:
        """`length` elements in `count` blocks."""
        make = BlockLayout.interleaved if self.blocks == "interleaved" else BlockLayout.contiguous
        return make(length, count)


@dataclass(frozen=True)
class Seat:
    """Where a method works: this rank among the workers, and the vector that it synchronises.

    options  those of the method
    sizes    of the tensors that make up the vector
    name     tells groups of one model apart
    common   what groups of one model share
    """

    rank: int
    workers: int
    length: int
    options: NoOptions = NoOptions()
    sizes: tuple[int, ...] = ()
    name: str = ""
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def team(self) -> Team:
        """All workers, seen from this one."""
        return Team(ranks_from(0, self.workers), self.rank)


class Method(Protocol):
    """One group's synchronisation. Built on every rank for the same seat, apart from the rank."""

    about: ClassVar[About]
    Options: ClassVar[type[NoOptions]]
    layout: BlockLayout

    def __init__(self, seat: Seat) -> None: ...

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks | None]:
        """Sum the memories of all ranks. Returns the agreed sum; None if it is dense, in memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of what it has learned, in plain values: the step is rolled back to it, or resumed from it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot. `StateError` if it cannot be one of this method in this place."""
        ...


class Stateless:
    """For methods that learn nothing from step to step."""

    Options: ClassVar[type[NoOptions]] = NoOptions

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
