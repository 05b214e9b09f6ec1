"""Small things that all ranks do together, over a session's transport, between steps."""

from torch import Tensor, nn

from spardl.collectives.program import AllReduce
from spardl.transport.base import Transport


def take_from_first(tensor: Tensor, transport: Transport) -> None:
    """Overwrite a tensor with rank 0's. Collective."""
    values = tensor.detach().float().contiguous()
    if transport.rank:
        values = values.new_zeros(values.shape)
    transport.perform(AllReduce(values, name="weights of rank 0"))
    tensor.detach().copy_(values)


def average(tensor: Tensor, transport: Transport) -> None:
    """Overwrite a tensor with its mean over ranks. Collective."""
    values = tensor.detach().float().contiguous().clone()
    transport.perform(AllReduce(values, name="mean"))
    tensor.detach().copy_(values / transport.workers)


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Running statistics and whatever else a model keeps beside its parameters, where a mean makes sense."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
