"""Inertia: the momentum of entries that have been sent starts anew.

An entry is sent when it has come far, which is when its momentum is largest; what that momentum would go on doing is
not agreed on by anybody. With gradients the velocity of what was sent starts anew for the same reason
(`memory/velocity.py`; Lin et al., "Deep Gradient Compression", ICLR 2018). docs/convergence.md has what it brings.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from spardl.integrations.optim.momentum import in_memory_order, is_gapless, unflatten
from spardl.integrations.parts import part_of
from spardl.integrations.replica import Replica
from spardl.sync.landing import Landing
from spardl.update import LocalUpdates

MOMENTA = ("momentum_buffer", "exp_avg")  # as the optimizers of torch call it


def restarts(rule: LocalUpdates, optimizer: Optimizer) -> bool:
    """Whether this optimizer's momentum, if it has any, starts anew where entries were sent."""
    return rule.sent_momentum == "restarted" or (rule.sent_momentum == "auto" and isinstance(optimizer, SGD))


class Inertia:
    """What optimizers remember of the directions in which weights were going.

    Args:
        rule: whether it starts anew where entries were sent; if it is "auto", that of SGD does.
        optimizers: those that step the weights.
    """

    def __init__(self, rule: LocalUpdates, optimizers: Sequence[Optimizer]) -> None:
        self._lost_by = [each for each in optimizers if restarts(rule, each)]

    @torch.no_grad()
    def restart(self, landings: Mapping[str, Landing], replicas: Mapping[str, Replica]) -> None:
        """Have momentum start anew wherever these landings, which are about to be applied, bring own weights nearer to
        the shared ones. A tensor that was sent whole keeps its momentum: all of it would be gone at every exchange."""
        if not self._lost_by:
            return
        for name, landing in landings.items():
            if landing.touched is not None:
                replica = replicas[name]
                momenta = [each for optimizer in self._lost_by for each in _momenta(optimizer, replica.parameter)]
                if momenta:
                    sent = _sent(landing.touched, landing.sent, replica)
                    for momentum in momenta:
                        _start_anew(momentum, landing.touched, sent, replica)


def _momenta(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """What an optimizer remembers of a parameter's direction: nothing, before it has stepped it."""
    known = optimizer.state.get(parameter, {})
    return [known[key] for key in MOMENTA if isinstance(known.get(key), Tensor)]


def _sent(touched: Tensor, sent: Tensor, replica: Replica) -> Tensor:
    """At which of the touched positions a difference was sent; at others, this rank keeps something for somebody."""
    difference = replica.shared[touched] - replica.own()[touched]
    return (difference - sent).abs() < difference.abs()


def _start_anew(momentum: Tensor, touched: Tensor, sent: Tensor, replica: Replica) -> None:
    alike = part_of(momentum).stride() == part_of(replica.parameter).stride()
    if alike and is_gapless(momentum):
        flat = in_memory_order(momentum)
        flat[touched] = flat[touched].masked_fill(sent, 0.0)
    else:  # a gradient that was laid out otherwise has made it
        stays = torch.ones_like(replica.shared)
        stays[touched] = (~sent).to(stays.dtype)
        part_of(momentum).mul_(part_of(unflatten(stays, replica.parameter)))
