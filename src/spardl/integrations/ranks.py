"""Small things that all ranks do together, over a session's transport, between steps."""

from torch import Tensor, nn

from spardl._torch_private import batch_norms
from spardl.collectives.program import AllReduce
from spardl.host import bring, quotient
from spardl.integrations.parts import gather_anew, part_of
from spardl.transport.base import Transport


def take_from_first(tensor: Tensor, transport: Transport) -> None:
    """Overwrite a tensor with rank 0's. Collective."""
    (values,) = bring([tensor.detach().float().contiguous()], transport.device)
    if transport.rank:
        values = values.new_zeros(values.shape)
    transport.perform(AllReduce(values, name="weights of rank 0"))
    tensor.detach().copy_(values, non_blocking=True)


def begin_alike(model: nn.Module, transport: Transport) -> None:
    """Give all ranks the weights and buffers of rank 0, or of a model in parts, its part of them. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            take_from_first(part_of(tensor), transport)
    gather_anew(model)


def average(tensor: Tensor, transport: Transport) -> None:
    """Overwrite a tensor with its mean over ranks. Collective."""
    (values,) = bring([tensor.detach().float().contiguous().clone()], transport.device)
    transport.perform(AllReduce(values, name="mean"))
    tensor.detach().copy_(quotient(values, transport.workers), non_blocking=True)


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Running statistics and whatever else a model keeps beside its parameters, where a mean makes sense."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def counters(model: nn.Module) -> list[Tensor]:
    """How many batches BatchNorm has seen; where ranks rest, not the same on all of them."""
    found = [norm.num_batches_tracked for norm in batch_norms(model)]
    return [each for each in found if each is not None]
