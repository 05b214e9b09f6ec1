"""Courier: takes how far weights have come to the other ranks, and brings back what all of them agreed on."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from spardl.collectives.program import AllReduce
from spardl.config import SyncConfig
from spardl.errors import LeftBehind, PeerError
from spardl.host import holds, quotient
from spardl.integrations import ranks
from spardl.integrations.exchange import Ahead, Exchange, Reset
from spardl.integrations.inertia import Inertia
from spardl.integrations.outer import Outer
from spardl.integrations.pace import Pace
from spardl.integrations.parts import is_sharded, part_of
from spardl.integrations.refusals import Refusals
from spardl.integrations.replica import Replica
from spardl.integrations.throttle import Throttle
from spardl.sync.community import Return, go_on, settle_return, together
from spardl.sync.landing import Landing
from spardl.sync.plan import plan_model
from spardl.sync.session import Session, compare_replicas
from spardl.update import LocalUpdates

REFUSED = "In an exchange {who} not finite. Nothing was sent, and shared weights are as they were on all ranks."
REFUSED_OFTEN = (
    "In {count} exchanges in a row {who} not finite, and nothing was sent: go back to a checkpoint with a lower"
    " learning rate, or clip gradients."
)
EXCHANGES: dict[str, type[Ahead] | type[Reset]] = {"ahead": Ahead, "reset": Reset}


class Courier:
    """One exchange at a time: begun, fetched, landed. If a rank is lost on the way, and the rule says so, the others go
    on without it, and what came to nothing is made again.

    Args:
        session: whose groups carry the weights.
        replicas: weights by name, own and shared.
        outer: how shared ones follow.
        inertia: what optimizers remember of directions.
        way: what is offered, and what becomes of own weights.
        rule: the settings.
    """

    def __init__(
        self,
        session: Session,
        replicas: Mapping[str, Replica],
        outer: Outer,
        inertia: Inertia,
        way: Exchange,
        rule: LocalUpdates,
    ) -> None:
        self.session, self.replicas, self.outer, self.way, self.rule = session, replicas, outer, way, rule
        self._inertia = inertia
        self.throttle = Throttle(*rule.density_limits) if rule.adaptive else None
        self.pace = Pace(rule.every, session.transport.workers) if rule.pace == "fitted" else None
        self.offered: int | None = None  # the step after which the exchange that has not landed yet began
        self.before: Callable[[], None] | None = None  # called before each, by whoever changes settings between two
        self._future: Future[bool] | None = None  # of it, until it has been fetched
        self._opened = 0.0  # when it was begun
        self._refusals = Refusals(REFUSED, REFUSED_OFTEN)

    # --- one exchange ---------------------------------------------------------------------------------------------

    @property
    def density(self) -> float:
        """Of the exchange that is next."""
        config = self.session.config
        if self.throttle is not None:
            return self.throttle.density
        return 1.0 if config.is_dense else config.schedule.at(self.session.sync.steps)

    def begin(self, step: int) -> None:
        """Begin an exchange of what weights are now, after so many steps."""
        if self.before is not None:
            self.before()
        self.offered = step
        self._begin(float(self.rule.residual_decay))

    def _begin(self, decay: float) -> None:
        while self._future is None:
            try:
                self._submit(decay)
            except PeerError:  # somebody was lost when the last exchange was over
                self._go_on_without(self._collect_late)

    @torch.no_grad()
    def _submit(self, decay: float) -> None:
        session, throttle, pace, number = self.session, self.throttle, self.pace, (self.offered or 0) // self.rule.every
        self._opened = time.perf_counter()
        self.outer.expect(self.density, session.transport.workers)
        session.begin(instead=torch.nan, density=None if throttle is None else throttle.density)
        compare_replicas(session, {name: each.shared for name, each in self.replicas.items()})
        self.way.offer(session, self.replicas, decay)
        self._future = session.close(deferred=self.rule.delay > 0)
        if throttle is not None and throttle.is_due:
            session.worker.run(lambda: throttle.adjust(session.transport, session.fellows))
        if pace is not None and pace.is_due(number):
            session.worker.run(lambda: pace.agree(session.transport))

    def fetch(self) -> None:
        """Wait for the exchange under way, if there is one, and have its landings ready; they change no weight yet."""
        while self._future is not None:
            started = time.perf_counter()
            try:
                self._collect(self._future.result(), started)
            except PeerError:
                self._future = None
                if not self._go_on_without(self._collect_late):
                    self._begin(decay=1.0)  # again, of weights that have decayed
            self.session.seconds_exposed += time.perf_counter() - started

    def _collect(self, counted: bool, started: float) -> None:
        """An exchange is over, for which training has waited since `started`."""
        self._future = None
        if self.throttle is not None:
            self.session.wait()  # for an adjustment, which all ranks make after the same exchange
            self.throttle.observe(took=self.session.events[-1].seconds, had=started - self._opened)
        if self.pace is not None:
            self.session.wait()  # likewise
            self.pace.apply()
        self._refusals.note(counted, self._who)
        if counted:
            self.way.collect(self.session)

    def _collect_late(self, counted: bool) -> None:
        """An exchange counts, as it has turned out."""
        self._collect(counted, time.perf_counter())

    def _who(self) -> str:
        bad = [n for n, each in self.replicas.items() if not holds(torch.isfinite(part_of(each.parameter)).all())]
        return f"this rank's weights {bad[0]!r} are" if bad else "some rank's weights were"

    @torch.no_grad()
    def land(self) -> None:
        """Fetch, and apply what was brought."""
        self.fetch()
        self.offered = None
        self._land()

    def _land(self) -> None:
        self._inertia.restart(self.way.landings, self.replicas)
        self.way.land(self.replicas, self.outer)

    def bring(self, offered: int | None, landings: dict[str, Landing]) -> None:
        """Nothing is under way; these are what an exchange has brought that began after this step."""
        self._future, self.offered, self.way.landings = None, offered, landings

    # --- all that is left -----------------------------------------------------------------------------------------

    def flush(self, model: nn.Module) -> None:
        """Send everything that is left, densely, and average the model's running statistics. Nothing is under way."""
        done = False
        while not done:
            try:
                done = together(self.session, lambda: self._prepare_flush(model))
            except PeerError:
                done = self._go_on_without(lambda _: None)

    @torch.no_grad()
    def _prepare_flush(self, model: nn.Module) -> Callable[[], bool]:
        """Sum up what all ranks hold; what is returned applies it."""
        session, transport = self.session, self.session.transport
        left = self.way.waiting(session)
        differences: dict[str, Tensor] = {}
        for name, replica in self.replicas.items():
            difference = replica.shared - replica.own()
            if name in left:
                difference += left[name]
            transport.perform(AllReduce(difference, name="all that is left"))
            differences[name] = quotient(difference, transport.workers)
        statistics = [(buffer, part_of(buffer).clone()) for buffer in ranks.float_buffers(model)]
        for buffer, values in statistics:
            ranks.average(values, transport)
            if session.fellows is not None and not is_sharded(buffer):
                session.fellows.average(values)
        counters = [(counter, counter.clone()) for counter in ranks.counters(model)]
        for _, values in counters:
            ranks.average(values, transport)
        return lambda: self._flush(differences, statistics + counters)

    @torch.no_grad()
    def _flush(self, differences: Mapping[str, Tensor], buffers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        self.way.forget(self.session)
        for name, replica in self.replicas.items():
            replica.shared -= differences[name]
            replica.own().copy_(replica.shared)
            replica.show()
        for buffer, values in buffers:
            part_of(buffer).copy_(values)
        return True

    # --- when ranks or settings change ----------------------------------------------------------------------------

    def _go_on_without(self, settle: Callable[[bool], None]) -> bool:
        """Go on with those that are left, if the rule says so; whether what was under way counts nevertheless.

        Called while the `PeerError` that says who was lost is handled.
        """
        if self.rule.on_loss != "continue":
            raise
        try:
            counts = go_on(self.session, settle)
        except LeftBehind:
            if self.rule.patience is None:
                self.session.worker.abandon()
            raise
        self.start_anew()
        return counts

    @torch.no_grad()
    def come_back(self, back: Return, given: Mapping[str, Any]) -> None:
        """The others went on without this rank, which is among them again: take their shared weights, outer momentum
        and adaptive density, and keep what this rank has not sent. p <- w_new - (w_old - p) loses nothing of it."""
        self._future = self.offered = None
        local = given["state"]["local"]
        settle_return(self.session, back, given["state"]["steps"], self._collect_late)
        self._land()  # of the exchange that was under way, if it counts
        for name, replica in self.replicas.items():
            shared = local["shared"][name].reshape(-1)
            replica.load(shared, shared - (replica.shared - replica.own()))
        self.outer.load(local["outer"])
        if self.throttle is not None and local["density"] is not None:
            self.throttle.density = local["density"]
        self.start_anew()

    def start_anew(self) -> None:
        """The number of workers is another: what was known of their time is of no use."""
        if self.throttle is not None:
            self.throttle.begin()

    def change_over(self, config: SyncConfig) -> None:
        """Go by these settings from the next exchange on; what waits moves along. Between exchanges, on all ranks."""
        session = self.session
        members = [member for plan in session.plan for member in plan.members]
        session.config = config
        session.regroup(plan_model(config, members, session.transport.workers))
