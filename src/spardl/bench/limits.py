"""What no method can beat: bytes that must travel, over the rate of the link, and passes over memory. Arithmetic only.

To average sparse vectors, a rank must send the share of its entries that others own, and what it has summed to them:
2(P-1)/P times one vector's entries. k entries of n take n H(k/n) bits for where they are, and their values' bits.
"""

import math
from dataclasses import dataclass

from spardl.transport.ring import ring_share
from spardl.wire.format import value_format


@dataclass(frozen=True)
class Limit:
    """Seconds that one synchronisation takes at least, by where they go.

    network   bytes over the rate of the link; nothing where no rate is known
    latency   messages that must follow one another: ceil(log2 P), after which all ranks can know of all others
    memory    passes over the vector, as measured on the same machine in the same run
    """

    network: float
    latency: float
    memory: float

    @property
    def total(self) -> float:
        return self.network + self.latency + self.memory


def limit(*, payload: float, workers: int, rate: float = math.inf, latency: float = 0.0, memory: float = 0.0) -> Limit:
    """For a vector that takes `payload` bytes in its form, over links of `rate` bytes per second."""
    return Limit(
        network=payload * ring_share(workers) / rate,
        latency=math.ceil(math.log2(workers)) * latency,
        memory=memory,
    )


def sparse_bytes(entries: int, elements: int, values: str) -> float:
    """The least that `entries` of `elements` take, wherever they lie, with values in the format of this name."""
    return (index_bits(entries, elements) + entries * value_format(values).bits) / 8


def index_bits(entries: int, elements: int) -> float:
    """n H(k/n): the entropy of which k of n entries they are."""
    share = entries / elements
    if share in (0.0, 1.0):
        return 0.0
    return -elements * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
