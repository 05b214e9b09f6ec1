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
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spardl.collectives.program import Team
from spardl.collectives.stretches import gather_bytes
from spardl.config import SyncConfig
from spardl.errors import ConfigError, LeftBehind, StateError
from spardl.integrations import newcomers, ranks
from spardl.integrations.boundary import Boundary
from spardl.integrations.courier import EXCHANGES, Courier
from spardl.integrations.handle import SyncHandle, check_saver
from spardl.integrations.hooks import Hook
from spardl.integrations.inertia import Inertia
from spardl.integrations.local_state import load_optimizers, on_host, optimizer_parts, own_part
from spardl.integrations.model import facts_of, parts_as_members, plain_module, size_of, stepped_parameters
from spardl.integrations.outer import Outer
from spardl.integrations.parts import gather_anew, mesh_of, part_of
from spardl.integrations.passing import PassingDDP
from spardl.integrations.replica import Replica
from spardl.kernels import for_device
from spardl.sync.community import Company, come_back, company_of, join
from spardl.sync.landing import Landing
from spardl.sync.session import Session, shared_settings
from spardl.transport.base import run
from spardl.transport.direct import DirectTransport
from spardl.transport.invitation import Invitation
from spardl.transport.members import Group
from spardl.update import LocalUpdates

logger = logging.getLogger(__name__)


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
        self._model, self._optimizers = model, list(optimizers)
        gather_anew(model)
        parameters = stepped_parameters(model, optimizers)
        mesh = mesh_of(parameters, process_group)
        members = parts_as_members(dict(reversed(parameters.items())))
        device = next(iter(parameters.values())).device
        check_rule(rule, config, device, in_parts=mesh is not None, joins=invitation is not None)
        self._passing = PassingDDP.of(model)
        way = EXCHANGES[rule.apply](rule)
        self.facts = {**shared_settings(config), "parameters": facts_of(parameters), "update": str(rule)}
        if invitation is None:
            self.session = Session.open(
                members,
                config,
                process_group=process_group,
                parts=mesh,
                device=device,
                facts=self.facts,
                of_weights=way.of_weights,
                lasts=rule.on_loss == "continue",
            )
            ranks.begin_alike(model, self.session.transport)
        else:
            self.session = join(members, config, invitation, of_weights=way.of_weights)
        transport = self.session.transport
        self._replicas = {each.name: Replica(parameters[each.name]) for each in members}
        self._outer = Outer(rule, for_device(torch.device(transport.device)), self._optimizers)
        self._outer.begin({name: each.shared for name, each in self._replicas.items()})
        inertia = Inertia(rule, self._optimizers)
        self._courier = Courier(self.session, self._replicas, self._outer, inertia, way, rule)
        self._outer.expect(self._courier.density, transport.workers)
        self._steps = 0  # of this rank's optimizers, and those that it has left out
        self._resumed = 0.0  # when the last step was over, exchange and all
        self._swapped = False
        names: dict[Tensor, str] = {each.parameter: name for name, each in self._replicas.items()}
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._boundary = Boundary(self._optimizers, self._step_is_over, scaler, names)
        self._size = size_of(self._optimizers)
        self._loading = plain_module(model).register_load_state_dict_post_hook(Hook(lambda *_: self._on_loaded()))
        logger.info(
            "rank %d steps weights of its own, begun at rank 0's, and exchanges them every %d step(s), %s, rate %g%s",
            transport.rank,
            rule.every,
            rule,
            self._outer.rates[0],
            "; DDP's own all-reduce is off" if self._passing is not None else "",
        )
        if rule.patience is not None and isinstance(transport, DirectTransport):
            transport.be_patient(rule.patience)
        if invitation is not None:
            try:
                if newcomers.take_over(self):
                    self._courier.begin(self._steps)
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
        if self._courier.pace is None or self._steps % self.rule.every < self.local_steps[self.session.transport.rank]:
            return False
        self._end_step()
        return True

    @property
    def steps(self) -> int:
        """How many steps the run has made, as all ranks count them: one that was left behind and has come back, and a
        newcomer, are where the others are."""
        return self._steps

    @property
    def local_steps(self) -> list[int]:
        """By rank, how many steps it takes from one exchange to the next; the same on all ranks."""
        pace = self._courier.pace
        return [self.rule.every] * self.session.transport.workers if pace is None else list(pace.counts)

    def _step_is_over(self) -> None:
        if self._courier.pace is not None and self._resumed:
            self._courier.pace.note(time.perf_counter() - self._resumed)
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
        _keep_up(self, self._exchange)
        self._resumed = time.perf_counter()

    def _exchange(self) -> None:
        """Land what is due to land, and begin what is due to begin."""
        due = self._steps % self.rule.every == 0
        offered = self._courier.offered
        if offered is not None and (due or self._steps >= offered + self.rule.delay):
            self._courier.land()
            _let_in(self, due=due)
        if due:
            self._courier.begin(self._steps)
            if not self.rule.delay:
                self._courier.land()
                _let_in(self, due=False)

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
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Have the model hold the other ones of own and shared weights."""
        for replica in self._replicas.values():
            replica.swap()
        gather_anew(self._model)
        self._swapped = not self._swapped

    def flush(self) -> None:
        """Send everything that is left, densely, and average running statistics: all ranks hold the same model then.

        Collective; for the end of training, or before a phase without synchronisation.
        """
        _check_own(self)
        self._courier.land()
        self._courier.flush(self._model)
        gather_anew(self._model)

    # --- the rest of its life -------------------------------------------------------------------------------------

    @property
    def company(self) -> Company:
        """The ranks that take part now, and the invitation with which others join them."""
        return company_of(self.session)

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
            for name, each in self._courier.way.landings.items()
        }
        throttle, pace = self._courier.throttle, self._courier.pace
        local = {
            "steps": self._steps,
            "offered": self._courier.offered,
            "density": None if throttle is None else throttle.density,
            "pace": None if pace is None else list(pace.counts),
            "shared": {name: both[shared] for name, both in weights.items()},
            "own": {name: both[own] for name, both in weights.items()},
            "outer": {name: each.clone() for name, each in self._outer.velocities.items()},
            "rates": list(self._outer.rates),
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
        torch.save(on_host(self.state_dict()), file)
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
        self._outer.rates = (local["rates"][0], local["rates"][1])
        if self._scaler is not None and local["scaler"]:
            self._scaler.load_state_dict(local["scaler"])
        with torch.no_grad():
            for name, replica in self._replicas.items():
                replica.load(local["shared"][name], local["own"][name])
            for name, buffer in self._model.named_buffers():
                if name in local["buffers"]:
                    part_of(buffer).copy_(local["buffers"][name], non_blocking=True)
        gather_anew(self._model)
        self._steps = local["steps"]
        courier, places = self._courier, {name: each.shared.device for name, each in self._replicas.items()}
        courier.bring(local["offered"], {name: each.on(places[name]) for name, each in local["landings"].items()})
        if courier.throttle is not None and local["density"] is not None:
            courier.throttle.density = local["density"]
        if courier.pace is not None and local["pace"] is not None and len(local["pace"]) == transport.workers:
            courier.pace.counts = [min(self.rule.every, count) for count in local["pace"]]
        self._resumed = 0.0

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        return {name: each.parameter for name, each in self._replicas.items()}

    def _settle(self) -> None:
        """Have what is under way arrived. It lands when its time has come, as if nobody had asked."""
        _keep_up(self, self._courier.fetch)
        self._courier.fetch()  # what began when this rank came back
        self.session.wait()

    def _on_loaded(self) -> None:
        """The model has loaded weights: they are the shared ones now, on every rank that loads them."""
        if self._swapped:
            return
        self._settle()
        self._courier.bring(None, {})
        with torch.no_grad():
            for replica in self._replicas.values():
                replica.begin()


def _keep_up(sync: LocalSync, job: Callable[[], None]) -> None:
    """Do this; if the others have gone on without this rank, join them instead, where the rule has it so."""
    try:
        job()
    except LeftBehind:
        if sync.rule.patience is None:
            raise
        _come_back(sync)


def _come_back(sync: LocalSync) -> None:
    """The others have gone on without this rank: join them where they are, with what it has not sent."""
    back = come_back(sync.session)
    given = newcomers.receive(sync.session)
    sync._courier.come_back(back, given)
    sync._steps = given["state"]["local"]["steps"]
    if given["due"]:
        sync._courier.begin(sync._steps)


def _let_in(sync: LocalSync, *, due: bool) -> None:
    """If somebody has knocked, which all ranks know at the same time, let it in. `due`: an exchange begins next."""
    if sync.session.worker.heard:
        came = newcomers.let_in(sync.session)
        sync._courier.start_anew()
        newcomers.hand_over(sync, came, due=due)


def _check_own(sync: LocalSync) -> None:
    if sync._swapped:
        raise StateError("the model holds shared weights here; end `with sync.shared():` first.")


def check_rule(rule: LocalUpdates, config: SyncConfig, device: torch.device, *, in_parts: bool, joins: bool) -> None:
    """Raise `ConfigError` where settings ask for what cannot be, with this model or as a newcomer."""
    if config.residuals_on == "cpu" and device.type != "cpu":
        raise ConfigError(
            'residuals_on="cpu" is about gradients: with update="local" a residual is how far weights are from the'
            " shared ones, which are on the device as well; leave it out."
        )
    if joins and rule.on_loss != "continue":
        raise ConfigError('an invitation is to a run with on_loss="continue"; give that here too.')
    if joins and device.type != "cpu":
        raise ConfigError("newcomers join runs on CPUs; move the model there first.")
    if in_parts and rule.on_loss == "continue":
        raise ConfigError('on_loss="continue" is for whole models: of one in parts, a lost rank takes its part.')
    if in_parts and rule.pace == "fitted":
        raise ConfigError('the ranks of a model in parts compute each step together; leave pace="fitted" out.')
    if rule.pace == "fitted" and rule.on_loss == "continue":
        raise ConfigError('pace="fitted" counts on the ranks that began; leave it or on_loss="continue" out.')
