"""What every method offers, and the registry that finds it by name."""

import importlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from spardl.blocks import BlockLayout
from spardl.collectives.memory import Memory
from spardl.collectives.program import Program, Team
from spardl.config import METHODS, SyncConfig, check_choice
from spardl.sparse import SparseBlocks


@dataclass(frozen=True, slots=True)
class About:
    """What `spardl methods` prints. k entries of n elements over P workers, d teams.

    by_blocks  it touches blocks one after another, so that some can be added up while others travel
    """

    paper: str
    rounds: str
    entries: str
    by_blocks: bool = False


@dataclass(frozen=True)
class Place:
    """Where a method works: this rank among the workers, and the vector that it synchronises.

    `sizes` are those of the tensors that make up the vector; `name` tells groups of one model apart, and `common` is
    what they share.
    """

    rank: int
    workers: int
    length: int
    config: SyncConfig
    sizes: tuple[int, ...] = ()
    name: str = ""
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def team(self) -> Team:
        """All workers, seen from this one."""
        return Team(tuple(range(self.workers)), self.rank)


class Method(Protocol):
    """One group's synchronisation. Built on every rank for the same place, apart from the rank."""

    about: ClassVar[About]
    layout: BlockLayout

    def __init__(self, place: Place) -> None: ...

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks | None]:
        """Sum the accumulators of all ranks. Returns the agreed sum; None if it is dense, in the accumulator."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def method_class(name: str) -> type[Method]:
    """The class registered under this name."""
    check_choice("method", name, tuple(METHODS), hint="`spardl methods` lists them")
    module, _, attribute = METHODS[name].partition(":")
    found: type[Method] = getattr(importlib.import_module(module), attribute)
    return found


def block_layout(place: Place, count: int) -> BlockLayout:
    make = BlockLayout.interleaved if place.config.blocks == "interleaved" else BlockLayout.contiguous
    return make(place.length, count)
