"""The adapter between DistributedDataParallel and a session.

DDP's buckets merely deliver gradients: state is keyed by parameter name, so a rebuild of the buckets does not matter.
Where there are several groups, one starts as soon as its last gradient lies in DDP's memory, before its bucket is full.
(This module must not postpone annotations: DDP compares the hook's with the real types.)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from spardl import _torch_private
from spardl.host import holds
from spardl.integrations.arranger import Arranger
from spardl.integrations.buckets import Buckets
from spardl.integrations.deliveries import Deliveries
from spardl.integrations.gradients import GradientHandle
from spardl.integrations.hooks import Hook
from spardl.integrations.model import dense_parameters, facts_of, members_of
from spardl.integrations.optim.momenta import Momenta
from spardl.integrations.optim.momentum import LocalMomentum
from spardl.integrations.setup import Setup
from spardl.integrations.watch import GradientWatch
from spardl.memory.velocity import Momentum
from spardl.planning.merging import Merging
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session, compare_replicas
from spardl.transport.members import Group as ProcessGroup


def spardl_hook(state: "SparDLState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The hook for `register_comm_hook`: its futures complete when the whole step has been synchronised."""
    return state.submit(bucket)


class SparDLState(GradientHandle):
    """What `attach` returns: the state that `spardl_hook` works on, and the handle that a script keeps.

    Arguments are those of `attach`. Making one is collective.
    """

    def __init__(self, model: DistributedDataParallel, process_group: ProcessGroup = None, **given: Any) -> None:
        setup = Setup.of(model, process_group, **given)
        model, config, optimizers = setup.model, setup.config, setup.optimizers
        self._parameters = dense_parameters(model)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._scaler = setup.scaler  # None if it is not enabled
        self._skips = bool(model.find_unused_parameters or model.static_graph)
        device = next(iter(self._names)).device
        # Gradients before their buckets: only where backward tells them one by one, in the thread that runs it.
        several = config.merge is not None or config.groups not in ("model", "bucket")
        self._early = several and device.type == "cpu" and not self._skips
        momentum = [group for each in optimizers for group in LocalMomentum.settings_of(each) or ()]
        self.session = Session.open(
            members_of(self._parameters),
            config,
            process_group=setup.process_group,
            device=device,
            facts={"parameters": facts_of(self._parameters), "momentum": momentum or None},
            momentum=bool(momentum),
            overlap=self._early,
        )
        self._momenta = Momenta(optimizers, self._parameters, self.session)
        moved, holds = self._momenta.optimizers, self.session.sync.holds
        self._watch = GradientWatch(self._names, optimizers, moved, holds, quiet=setup.quiet)
        self._buckets = Buckets(self._names, provisional=2 if model.static_graph else 1)
        self._arranger = Arranger(config, self._buckets)
        self._open = self._awaited = False
        self._rules: dict[str, Momentum] = {}
        self._arrived: dict[str, Tensor] = {}
        self._deliveries = Deliveries()
        self._last: str | None = None  # the gradient that is on its way into DDP's memory
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(Hook(self._before_forward))]
        self._hooks.append(model.register_forward_hook(Hook(lambda *_: self._arranger.forward_ends())))
        if self._early or self._arranger.watches:
            noted = Hook(self._on_gradient)
            self._hooks += [each.register_post_accumulate_grad_hook(noted) for each in self._names]

    # --- one step -------------------------------------------------------------------------------------------------

    def submit(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Take a bucket; groups whose last gradient this was start; the last bucket closes the step."""
        self._begin()
        buffer = bucket.buffer()
        if buffer.layout is torch.strided:
            future = self._deliveries.expect(buffer)
            self._take_bucket(bucket.parameters(), buffer)
        else:
            future = self._deliveries.expect(self.session.average(buffer))
        if bucket.is_last():
            self._end()
        return future

    def _begin(self) -> None:
        if self._open:
            return
        self.session.check()
        self._open, self._last = True, None
        self._arrived.clear()
        self._deliveries.begin()
        self._buckets.begin()
        self._rules = self._momenta.rules(loaded=self._loaded)
        scale, instead = (self._scaler.get_scale(), torch.nan) if self._scaler is not None else (1.0, 0.0)
        self.session.begin(scale=scale, skips=self._skips, instead=instead)
        compare_replicas(self.session, self._parameters)

    def _on_gradient(self, parameter: Tensor) -> None:
        """This gradient is ready. DDP copies it into its bucket right after this hook, so the one before is there."""
        if not self._awaited:
            return
        name = self._names[cast(Parameter, parameter)]
        self._arranger.gradient_is_ready(name)
        if self._early and self._buckets.views and self.session.worker.failure is None:
            self._begin()
            landed, self._last = self._last, name
            if landed in self._buckets.views:
                self._take(landed, self._buckets.views[landed])

    def _take_bucket(self, parameters: list[Parameter], buffer: Tensor) -> None:
        delivered = dict(self._buckets.parts(parameters, buffer, in_backward=self._awaited))
        unknown = [Member(name, each.numel()) for name, each in delivered.items() if not self.session.sync.knows(name)]
        if unknown:  # frozen at attach, but not when DDP wrapped the model
            self.session.include(plan_group(self.session.config, unknown, self.session.transport.workers))
        for name, gradient in delivered.items():
            if name not in self._arrived:
                self._take(name, gradient)
            assert self._arrived[name].data_ptr() == gradient.data_ptr(), "DDP's buckets have moved"

    def _take(self, name: str, gradient: Tensor) -> None:
        base, rule = self._watch.take_base(name), self._rules.get(name)
        if base is not None and rule is not None:
            rule = replace(rule, continued=True)
        self._arrived[name] = gradient
        unused = self._skips and self._watch.is_unused(self._parameters[name]) and not holds(gradient.any())
        self.session.submit(name, gradient, momentum=rule, base=base, unused=unused)

    def _end(self) -> None:
        self._open = self._awaited = False
        self._buckets.end()
        self.session.close(self._after_step, first=self._before_commit).add_done_callback(self._deliveries.complete)
        # Before DDP looks at the futures, so that errors come out of backward() as they are. A rank that has joined
        # early (DDP's Join) calls hooks outside any backward; there the futures alone carry them.
        _torch_private.after_backward(self._after_backward)

    def _before_commit(self) -> None:
        sizes = {name: gradient.numel() for name, gradient in self._arrived.items()}
        self._arranger.before_commit(self.session, sizes, momentum=bool(self._momenta.optimizers))

    def _after_step(self, counted: bool) -> None:
        """On the communication thread, before DDP has its results: what is to be noted and rearranged."""
        self._watch.synchronised(self._arrived, self.session.events[-1], scaled=self._scaler is not None)
        if plans := self._arranger.plans(self.session, counted=counted):
            self.session.regroup(plans)

    def _after_backward(self) -> None:
        self.session.wait()
        self.session.check()

    def _before_forward(self, model: DistributedDataParallel, *_: Any) -> None:
        """After a failure DDP's next step would end in an internal error, or wait for the rank that is gone."""
        if torch.is_grad_enabled():
            self.session.check()
            self._awaited = model.require_backward_grad_sync
            self._arranger.forward_begins()

    # --- the rest of its life -------------------------------------------------------------------------------------

    @property
    def merging(self) -> Merging | None:
        """With `merge`: what was measured and planned, to print and to draw; None until enough steps are known."""
        self.session.wait()
        return self._arranger.merging

    def _leave(self) -> None:
        """DDP cannot drop a hook, so ours stays, and averages densely."""
        super()._leave()
        self._watch.stop()
        for hook in self._hooks:
            hook.remove()

    def _extras(self) -> dict[str, Any]:
        return self._arranger.state_dict(self.session.config)

    def _regroups(self, state: Mapping[str, Any]) -> bool:
        return self.session.config.groups == "bucket" or bool(state.get("planned"))

    def _load_extras(self, state: Mapping[str, Any]) -> None:
        super()._load_extras(state)
        self._arranger.load_state_dict(state)
