"""Fellows: the ranks that hold the other parts of a model which this rank holds a part of.

Each part is synchronised by itself, with the ranks that hold the same part of other replicas. But a step counts for the
whole model or for none of it: a value that is not finite in one part is refused by all.
"""

import torch
from torch import Tensor

from spardl.collectives.program import AllReduce
from spardl.errors import StateError
from spardl.host import download, quotient
from spardl.transport.base import Transport
from spardl.transport.members import Group
from spardl.transport.torchdist import TorchTransport

PATIENCE = 2.0  # times what a part waits for its replicas, so that who knows what went wrong is heard first


class Fellows:
    """Connections of our own between the ranks of one replica: a model's own collectives may run at the same time.

    Making one is collective. A rank that fails leaves, so that the others need not wait for it. This rank holds part
    `position` of `count`.
    """

    def __init__(self, group: Group, *, timeout: float, device: torch.device | str = "cpu") -> None:
        transport = TorchTransport(group, timeout=PATIENCE * timeout, device=device)
        self.position, self.count = transport.rank, transport.workers
        self._transport: Transport | None = transport

    def agree(self, fine: bool) -> bool:
        """Whether all parts are fine. Collective: an all-reduce of one number."""
        transport = self._connected()
        against = torch.full((1,), 0.0 if fine else 1.0, device=transport.device)
        transport.perform(AllReduce(against, name="agreement between the parts of a model"))
        transport.arrive()
        return not download(against).any()

    def least(self, value: float) -> float:
        """The least of all parts' values. Collective."""
        transport = self._connected()
        values = torch.zeros(transport.workers, device=transport.device)
        values[transport.rank] = value
        transport.perform(AllReduce(values, name="agreement between the parts of a model"))
        transport.arrive()
        return float(download(values.min()))

    def average(self, tensor: Tensor) -> None:
        """Overwrite a tensor, which each of them has, with its mean. Collective."""
        transport = self._connected()
        values = tensor.detach().float().contiguous().clone()
        transport.perform(AllReduce(values, name="mean"))
        tensor.detach().copy_(quotient(values, transport.workers))

    def leave(self) -> None:
        """Close the connections; whoever waits for this rank is told that it is gone."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _connected(self) -> Transport:
        if self._transport is None:
            raise StateError("this session has ended; open another one.")
        return self._transport
