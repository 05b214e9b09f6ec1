"""Local updates: every rank steps its own optimizer, and what is exchanged, sparsely, is how far weights have come.

The shared weights w are the same bits on all ranks, a rank's own are p. What it has not sent is w - p, and stays
applied where it was computed ("step-ahead error feedback": Xu, Huo and Huang, AAAI 2021; local SGD is its relative). An
exchange moves the largest differences of all ranks: with their mean g and what this rank has put into it t,

    w  <-  w - outer(g)        p  <-  w - (w - p - t)

and only touched entries change. It may run beside the next steps; what it brings lands when they are done.
"""

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from spardl.collectives.program import AllReduce, Team
from spardl.collectives.stretches import gather_bytes
from spardl.config import SyncConfig
from spardl.errors import ConfigError, PeerError, StateError
from spardl.host import holds
from spardl.integrations import newcomers, ranks
from spardl.integrations.boundary import Boundary
from spardl.integrations.exchange import Ahead, Exchange, Reset
from spardl.integrations.handle import SyncHandle, check_saver
from spardl.integrations.hooks import Hook
from spardl.integrations.local_state import load_optimizers, optimizer_parts, own_part
from spardl.integrations.model import facts_of, parts_as_members, plain_module, size_of, stepped_parameters
from spardl.integrations.outer import Outer
from spardl.integrations.pace import Pace
from spardl.integrations.parts import gather_anew, is_sharded, mesh_of, part_of
from spardl.integrations.passing import PassingDDP
from spardl.integrations.refusals import Refusals
from spardl.integrations.replica import Replica
from spardl.integrations.throttle import Throttle
from spardl.kernels import for_device
from spardl.metrics import SyncStats
from spardl.sync.community import Company, company_of, go_on, join, together
from spardl.sync.landing import Landing
from spardl.sync.plan import plan_model
from spardl.sync.session import Session, compare_replicas, shared_settings
from spardl.transport.base import run
from spardl.transport.invitation import Invitation
from spardl.transport.torchdist import Group
from spardl.update import LocalUpdates

logger = logging.getLogger(__name__)

REFUSED = "In an exchange {who} not finite. Nothing was sent, and shared weights are as they were on all ranks."
REFUSED_OFTEN = (
    "In {count} exchanges in a row {who} not finite, and nothing was sent: go back to a checkpoint with a lower"
    " learning rate, or clip gradients."
)
EXCHANGES: dict[str, type[Ahead] | type[Reset]] = {"ahead": Ahead, "reset": Reset}


class LocalSync(SyncHandle):
    """What `attach(update="local")` returns. Making one is collective, and gives all ranks the weights of rank 0.

    Args:
        model: any module; if DDP has wrapped it, DDP's all-reduce is switched off. Of one that lies in parts (FSDP2,
            tensor parallel) each rank steps and exchanges its own part.
        optimizers: those that step it. A step is over when each of them has stepped, or a scaler has skipped it.
        config: how exchanges are made.
        rule: when, and what becomes of weights.
        scaler: the GradScaler in use.
        process_group: the ranks that take part; of a model in parts, those that hold the same part.
        invitation: to a run that goes on: this rank joins it, and begins at its shared weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: SyncConfig,
        rule: LocalUpdates,
        *,
        scaler: torch.amp.GradScaler | None = None,
        process_group: Group = None,
        invitation: Invitation | None = None,
    ) -> None:
        self.rule = rule
        self._goes_on = rule.on_loss == "continue"
        self._throttle = Throttle(*rule.density_limits) if rule.adaptive else None
        check_pace(rule, model)
        self._model, self._optimizers = model, list(optimizers)
        self._passing = PassingDDP.of(model)
        gather_anew(model)
        parameters = stepped_parameters(model, optimizers)
        members = parts_as_members(dict(reversed(parameters.items())))
        device = next(iter(parameters.values())).device
        if config.residuals_on == "cpu" and device.type != "cpu":
            raise ConfigError(
                'residuals_on="cpu" is about gradients: with update="local" a residual is how far weights are from the'
                " shared ones, which are on the device as well; leave it out."
            )
        if invitation is not None and not self._goes_on:
            raise ConfigError('an invitation is to a run with on_loss="continue"; give that here too.')
        if invitation is not None and device.type != "cpu":
            raise ConfigError("newcomers join runs on CPUs; move the model there first.")
        if self._goes_on and mesh_of(parameters, process_group) is not None:
            raise ConfigError('on_loss="continue" is for whole models: of one in parts, a lost rank takes its part.')
        exchange: Exchange = EXCHANGES[rule.apply](rule)
        self._exchange = exchange
        self.facts = {**shared_settings(config), "parameters": facts_of(parameters), "update": str(rule)}
        if invitation is None:
            self.session = Session.open(
                members,
                config,
                process_group=process_group,
                parts=mesh_of(parameters, process_group),
                device=device,
                facts=self.facts,
                of_weights=exchange.of_weights,
                lasts=self._goes_on,
            )
            ranks.begin_alike(model, self.session.transport)
        else:
            self.session = join(members, config, invitation, of_weights=exchange.of_weights)
        transport = self.session.transport
        self._replicas = {each.name: Replica(parameters[each.name]) for each in members}
        rate = outer_rate(rule, config, transport.workers, self._optimizers)
        self._outer = Outer(rule, rate, for_device(torch.device(transport.device)), self._optimizers)
        self._outer.begin({name: each.shared for name, each in self._replicas.items()})
        self._steps = 0  # of this rank's optimizers, and those that it has left out
        self._pace = Pace(rule.every, transport.workers) if rule.pace == "fitted" else None
        self._resumed = 0.0  # when the last step was over, exchange and all
        self._offered: int | None = None  # the step after which the exchange under way has begun
        self._future: Future[bool] | None = None  # of it, until it has been fetched
        self._refusals = Refusals(REFUSED, REFUSED_OFTEN)
        self._swapped = False
        self._opened = self.seconds_exposed = 0.0
        names: dict[Tensor, str] = {each.parameter: name for name, each in self._replicas.items()}
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._boundary = Boundary(self._optimizers, self._step_is_over, scaler, names)
        self.before_exchange: Callable[[], None] | None = None  # whoever wants to change settings between two
        self._size = size_of(self._optimizers)
        self._loading = plain_module(model).register_load_state_dict_post_hook(Hook(lambda *_: self._on_loaded()))
        logger.info(
            "rank %d steps weights of its own, begun at rank 0's, and exchanges them every %d step(s), %s, rate %g%s",
            transport.rank,
            rule.every,
            rule,
            rate,
            "; DDP's own all-reduce is off" if self._passing is not None else "",
        )
        if invitation is not None:
            try:
                if newcomers.take_over(self):
                    self._offer()
            except BaseException:
                self.session.end()
                raise

    # --- steps ----------------------------------------------------------------------------------------------------

    def rests(self) -> bool:
        """Whether this rank leaves the step that would begin now out, because it is slower than others; only with
        pace="fitted". To be asked once before each step; where it says so, go on with the next batch:

            for batch in loader:
                if sync.rests():
                    continue

        All ranks have as many steps and exchanges, so schedules, epochs and checkpoints stay together.
        """
        if self._pace is None or self._steps % self.rule.every < self.local_steps[self.session.transport.rank]:
            return False
        self._end_step()
        return True

    @property
    def local_steps(self) -> list[int]:
        """By rank, how many steps it takes from one exchange to the next; the same on all ranks."""
        every = [self.rule.every] * self.session.transport.workers
        return every if self._pace is None else list(self._pace.counts)

    def _step_is_over(self) -> None:
        if self._pace is not None and self._resumed:
            self._pace.note(time.perf_counter() - self._resumed)
        self._end_step()

    def _end_step(self) -> None:
        if self._swapped:
            raise StateError("the optimizer has stepped shared weights: end `with sync.shared():` before training on.")
        if size_of(self._optimizers) != self._size:
            raise StateError(
                "an optimizer has got parameters since attach, or lost some, and these would drift apart; detach() and"
                " attach again when parameter groups change."
            )
        self._steps += 1
        due = self._steps % self.rule.every == 0
        if self._offered is not None and (due or self._steps >= self._offered + self.rule.delay):
            self._land()
            _let_in(self, due=due)
        if due:
            self._offer()
            if not self.rule.delay:
                self._land()
                _let_in(self, due=False)
        self._resumed = time.perf_counter()

    def _offer(self) -> None:
        if self.before_exchange is not None:
            self.before_exchange()
        while self._future is None:
            try:
                _submit(self)
            except PeerError:  # somebody was lost when the last exchange was over
                _go_on_without(self, lambda counted: _collect_late(self, counted))
        self._offered = self._steps

    def _land(self) -> None:
        """Wait for the exchange under way, if there is one, and apply what it has brought."""
        self._fetch()
        self._offered = None
        with torch.no_grad():
            self._exchange.land(self._replicas, self._outer)

    def _fetch(self) -> None:
        """Wait for the exchange under way, and have its landings ready; they change no weight yet."""
        while self._future is not None:
            started = time.perf_counter()
            try:
                _collect(self, self._future.result(), started)
            except PeerError:
                self._future = None
                if not _go_on_without(self, lambda counted: _collect_late(self, counted)):
                    _resubmit(self)
            self.seconds_exposed += time.perf_counter() - started

    # --- shared weights -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Have the model hold the shared weights inside this block, to evaluate or to save it; not to train it.

        They are the same bits on all ranks. Nothing is sent, so ranks need not do it together; one tensor at a time is
        copied. Running statistics (BatchNorm) stay this rank's own.
        """
        if self._swapped:
            yield
            return
        _swap(self)
        try:
            yield
        finally:
            _swap(self)

    def flush(self) -> None:
        """Send everything that is left, densely, and average running statistics: all ranks hold the same model then.

        Collective; for the end of training, or before a phase without synchronisation.
        """
        _check_own(self)
        self._land()
        done = False
        while not done:
            try:
                done = together(self.session, lambda: _prepare_flush(self))
            except PeerError:
                done = _go_on_without(self, lambda _: None)
        gather_anew(self._model)

    # --- the rest of its life -------------------------------------------------------------------------------------

    @property
    def company(self) -> Company:
        """The ranks that take part now, and the invitation with which others join them."""
        return company_of(self.session)

    def stats(self) -> SyncStats:
        stats = super().stats()
        stats.seconds_exposed = self.seconds_exposed
        return stats

    def _leave(self) -> None:
        self.flush()
        self._boundary.end()
        self._loading.remove()
        if self._passing is not None:
            self._passing.end()

    def detach(self) -> None:
        """Stop exchanging weights, after a last dense exchange: all ranks hold the same model. Collective.

        A model that DDP has wrapped averages its gradients densely from now on.
        """
        self._leave()
        self.session.end()

    def state_dict(self) -> dict[str, Any]:
        """What *this rank* needs to go on exactly: shared and own weights, controllers, what is under way, and what its
        optimizers, scaler and running statistics hold, which are each rank's own. One file per rank."""
        check_saver()
        self._settle()
        weights = {name: [each.shared.clone(), each.own().clone()] for name, each in self._replicas.items()}
        shared, own = (1, 0) if self._swapped else (0, 1)
        landings = {
            name: {field.name: getattr(each, field.name) for field in fields(Landing)}
            for name, each in self._exchange.landings.items()
        }
        local = {
            "steps": self._steps,
            "offered": self._offered,
            "density": None if self._throttle is None else self._throttle.density,
            "pace": None if self._pace is None else list(self._pace.counts),
            "shared": {name: both[shared] for name, both in weights.items()},
            "own": {name: both[own] for name, both in weights.items()},
            "outer": {name: each.clone() for name, each in self._outer.velocities.items()},
            "landings": landings,
            "buffers": {name: part_of(buffer).clone() for name, buffer in self._model.named_buffers()},
            "optimizers": [optimizer_parts(each) for each in self._optimizers],
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }
        return {**self.session.state_dict(), "local": local}

    def gathered_state_dict(self) -> dict[str, Any]:
        """All ranks' states as one, the same on every rank, to be saved by any of them. Collective.

        It loads on every rank, also with another number of workers.
        """
        file, transport = io.BytesIO(), self.session.transport
        torch.save(self.state_dict(), file)
        team = Team(tuple(range(transport.workers)), transport.rank)
        texts = run(gather_bytes(team, np.frombuffer(file.getbuffer(), np.uint8)), transport)
        states = [torch.load(io.BytesIO(text.tobytes()), weights_only=True) for text in texts]
        return {"version": states[0]["version"], "workers": transport.workers, "ranks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`, or from a gathered one, exactly: weights, optimizers and all.

        To be called last, since it holds what model and optimizers have loaded for other ranks.

        Raises:
            StateError: it is of another rank, world or model, or damaged; nothing was changed.
        """
        _check_own(self)
        self._settle()
        transport = self.session.transport
        sizes = {name: each.elements for name, each in self._replicas.items()}
        local = own_part(state, transport.rank, transport.workers, sizes)
        self._outer.check(local["outer"])
        self.session.load_state_dict(state)
        load_optimizers(self._optimizers, local["optimizers"])
        self._outer.load(local["outer"])
        if self._scaler is not None and local["scaler"]:
            self._scaler.load_state_dict(local["scaler"])
        with torch.no_grad():
            for name, replica in self._replicas.items():
                replica.load(local["shared"][name], local["own"][name])
            for name, buffer in self._model.named_buffers():
                if name in local["buffers"]:
                    part_of(buffer).copy_(local["buffers"][name], non_blocking=True)
        gather_anew(self._model)
        self._steps, self._offered, self._future = local["steps"], local["offered"], None
        self._exchange.landings = {
            name: each.on(self._replicas[name].shared.device) for name, each in local["landings"].items()
        }
        if self._throttle is not None and local["density"] is not None:
            self._throttle.density = local["density"]
        if self._pace is not None and local["pace"] is not None and len(local["pace"]) == transport.workers:
            self._pace.counts = [min(self.rule.every, count) for count in local["pace"]]
        self._resumed = 0.0

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        return {name: each.parameter for name, each in self._replicas.items()}

    def _settle(self) -> None:
        """Have what is under way arrived. It lands when its time has come, as if nobody had asked."""
        self._fetch()
        self.session.wait()

    def _on_loaded(self) -> None:
        """The model has loaded weights: they are the shared ones now, on every rank that loads them."""
        if self._swapped:
            return
        self._settle()
        self._exchange.landings, self._offered = {}, None
        with torch.no_grad():
            for replica in self._replicas.values():
                replica.begin()


def _check_own(sync: LocalSync) -> None:
    if sync._swapped:
        raise StateError("the model holds shared weights here; end `with sync.shared():` first.")


def _swap(sync: LocalSync) -> None:
    """Have the model hold the other ones of own and shared weights."""
    with torch.no_grad():
        for replica in sync._replicas.values():
            replica.swap()
    gather_anew(sync._model)
    sync._swapped = not sync._swapped


# --- one exchange -----------------------------------------------------------------------------------------------------


def _submit(sync: LocalSync, *, again: bool = False) -> None:
    """Begin an exchange of what weights are now; `again` if one came to nothing."""
    session, throttle = sync.session, sync._throttle
    with torch.no_grad():
        sync._opened = time.perf_counter()
        session.begin(instead=torch.nan, density=None if throttle is None else throttle.density)
        compare_replicas(session, {name: each.shared for name, each in sync._replicas.items()})
        decay = 1.0 if again else float(sync.rule.residual_decay)
        sync._exchange.offer(session, sync._replicas, decay)
        sync._future = session.close(deferred=sync.rule.delay > 0)
        if throttle is not None and throttle.is_due:
            session.worker.run(lambda: throttle.adjust(session.transport, session.fellows))
        pace = sync._pace
        if pace is not None and pace.is_due(sync._steps // sync.rule.every):
            session.worker.run(lambda: pace.agree(session.transport))


def _collect(sync: LocalSync, counted: bool, started: float) -> None:
    """An exchange is over, for which training has waited since `started`."""
    sync._future = None
    if sync._throttle is not None:
        sync.session.wait()  # for an adjustment, which all ranks make after the same exchange
        sync._throttle.observe(took=sync.session.events[-1].seconds, had=started - sync._opened)
    if sync._pace is not None:
        sync.session.wait()  # likewise
        sync._pace.apply()
    sync._refusals.note(counted, lambda: _who(sync))
    if counted:
        sync._exchange.collect(sync.session)


def _collect_late(sync: LocalSync, counted: bool) -> None:
    """An exchange counts, as it has turned out."""
    _collect(sync, counted, time.perf_counter())


def _resubmit(sync: LocalSync) -> None:
    """Make an exchange again that came to nothing."""
    while sync._future is None:
        try:
            _submit(sync, again=True)
        except PeerError:
            _go_on_without(sync, lambda counted: _collect_late(sync, counted))


def _who(sync: LocalSync) -> str:
    bad = [n for n, each in sync._replicas.items() if not holds(torch.isfinite(part_of(each.parameter)).all())]
    return f"this rank's weights {bad[0]!r} are" if bad else "some rank's weights were"


# --- when ranks leave or come -----------------------------------------------------------------------------------------


def _go_on_without(sync: LocalSync, settle: Callable[[bool], None]) -> bool:
    """Go on with those that are left, if the rule says so; whether what was under way counts nevertheless.

    Called while the `PeerError` that says who was lost is handled.
    """
    if not sync._goes_on:
        raise
    counts = go_on(sync.session, settle)
    _form_anew(sync)
    return counts


def _let_in(sync: LocalSync, *, due: bool) -> None:
    """If somebody has knocked, which all ranks know at the same time, let it in. `due`: an exchange begins next."""
    if sync.session.worker.heard:
        came = newcomers.let_in(sync.session)
        _form_anew(sync)
        newcomers.hand_over(sync, came, due=due)


def _form_anew(sync: LocalSync) -> None:
    """Have what depends on the number of workers follow it."""
    sync._outer.rate = outer_rate(sync.rule, sync.config, sync.session.transport.workers, sync._optimizers)
    if sync._throttle is not None:
        sync._throttle.begin()


# --- all that is left -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _prepare_flush(sync: LocalSync) -> Callable[[], bool]:
    """Sum up what all ranks hold; what is returned applies it."""
    session, transport = sync.session, sync.session.transport
    left = sync._exchange.waiting(session)
    differences: dict[str, Tensor] = {}
    for name, replica in sync._replicas.items():
        difference = replica.shared - replica.own()
        if name in left:
            difference += left[name]
        transport.perform(AllReduce(difference, name="all that is left"))
        differences[name] = difference.div_(transport.workers)
    buffers = [(buffer, part_of(buffer).clone()) for buffer in ranks.float_buffers(sync._model)]
    for buffer, values in buffers:
        ranks.average(values, transport)
        if session.fellows is not None and not is_sharded(buffer):
            session.fellows.average(values)
    counters = [(counter, counter.clone()) for counter in ranks.counters(sync._model)]
    for _, values in counters:
        ranks.average(values, transport)
    buffers += counters
    return lambda: _flush(sync, differences, buffers)


@torch.no_grad()
def _flush(sync: LocalSync, differences: Mapping[str, Tensor], buffers: Sequence[tuple[Tensor, Tensor]]) -> bool:
    sync._exchange.forget(sync.session)
    for name, replica in sync._replicas.items():
        replica.shared -= differences[name]
        replica.own().copy_(replica.shared)
        replica.show()
    for buffer, values in buffers:
        part_of(buffer).copy_(values)
    return True


def check_pace(rule: LocalUpdates, model: nn.Module) -> None:
    """Raise `ConfigError` where ranks must not take steps by themselves."""
    if rule.pace == "fitted" and any(map(is_sharded, model.parameters())):
        raise ConfigError('the ranks of a model in parts compute each step together; leave pace="fitted" out.')
    if rule.pace == "fitted" and rule.on_loss == "continue":
        raise ConfigError('pace="fitted" counts on the ranks that began; leave it or on_loss="continue" out.')


def outer_rate(rule: LocalUpdates, config: SyncConfig, workers: int, optimizers: Sequence[Optimizer]) -> float:
    """The factor of the agreed mean under these settings."""
    adaptive_steps = not any(isinstance(each, SGD) for each in optimizers)
    density = 1.0 if config.is_dense else config.schedule.final
    return rule.rate(workers, density, adaptive=adaptive_steps)


def change_over(sync: LocalSync, config: SyncConfig) -> None:
    """Exchange by these settings from the next time on; what waits moves along. Between exchanges, on all ranks."""
    session = sync.session
    members = [member for plan in session.plan for member in plan.members]
    session.config = config
    session.regroup(plan_model(config, members, session.transport.workers))
    sync._outer.rate = outer_rate(sync.rule, config, session.transport.workers, sync._optimizers)
