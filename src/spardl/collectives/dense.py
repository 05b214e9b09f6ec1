"""Dense all-reduce: every entry, every step. What every sparse method is measured against."""

from typing import Any, ClassVar

from spardl.blocks import BlockLayout
from spardl.collectives.memory import Memory
from spardl.collectives.method import About
from spardl.collectives.program import AllReduce, Program
from spardl.config import SyncConfig


class Dense:
    """The transport's own all-reduce over the whole accumulator. Values travel as float32."""

    about: ClassVar[About] = About(paper="-", rounds="2(P-1) (ring)", entries="2n (P-1)/P")

    def __init__(self, rank: int, workers: int, length: int, config: SyncConfig) -> None:
        self.layout = BlockLayout.contiguous(length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield AllReduce(memory.acc.values)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
