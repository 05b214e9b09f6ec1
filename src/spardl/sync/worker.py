"""Worker: drives a synchronizer's programs over a transport, in order, on threads beside the caller's.

The protocol of a step is in `step.py`; here it gets a transport, a thread and a stop-watch.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from spardl.collectives.numbers import all_gather_numbers
from spardl.collectives.program import AllReduce, Ask, Program, Team, answers, until_asked
from spardl.host import bring, quotient
from spardl.sync import step as steps
from spardl.sync.aside import Aside
from spardl.sync.fellows import Fellows
from spardl.sync.group import Group
from spardl.sync.lanes import Lanes
from spardl.sync.step import Outcome, Part, Terms
from spardl.sync.synchronizer import Synchronizer
from spardl.transport.base import Transport, run
from spardl.transport.direct import DirectTransport

Result = TypeVar("Result")


class Worker:
    """Jobs run one after the other. After a failure nothing else runs; the step that failed has been rolled back.

    `fellows` are the ranks with the other parts of the model, if there are others: a step counts on all or on none.
    `votes`: ranks wait for each other before they conclude anything, so that it is concluded on all that are left or on
    none of them when ranks are lost. `concluded` counts what was. `heard`: somebody wants to join, which all ranks know
    after the same step.
    """

    def __init__(
        self,
        sync: Synchronizer,
        transport: Transport,
        lanes: Lanes,
        fellows: Fellows | None = None,
        *,
        votes: bool = False,
    ) -> None:
        self.aside = Aside(sync.device)
        self.failure: BaseException | None = None
        self.concluded = 0
        self.heard = False
        self.votes = votes
        self._undecided: Callable[[], Any] | None = None  # what waits for all ranks to be ready for it
        self._asking: list[tuple[Group, Program[Outcome], Ask]] = []  # groups whose programs wait for a device
        self._sync = sync
        self._transport = transport
        self._lanes = lanes
        self._fellows = fellows

    @property
    def is_lazy(self) -> bool:
        """Whether the exchange is to add gradients up: not where other ranks need the core, nor while others travel."""
        return not self._sync.crew.crowded and not self._lanes.run_ahead

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        if self.failure is not None:
            raise self.failure

    def wait(self) -> None:
        """Return when nothing is under way."""
        self._lanes.wait()

    def stop(self, why: Exception) -> None:
        """End the threads."""
        self._lanes.stop()
        self.failure = self.failure or why

    def run(self, job: Callable[[], Result], *, deferred: bool = False) -> "Future[Result]":
        """Do this after what was asked for before. Without a thread, at once; `deferred`, when the result is asked for,
        or something else is to be done."""
        return (self._lanes.defer if deferred else self._lanes.run)(lambda: self._guarded(job))

    def _guarded(self, job: Callable[[], Result]) -> Result:
        self.check()
        try:
            with self.aside.within():
                return job()
        except BaseException as error:
            self.failure = error
            self._lanes.stop_preparing()  # nothing must be added to what is rolled back
            if self._undecided is None:
                with self.aside.within():
                    self.abandon()
                self.aside.join()
            if self._fellows is not None:
                self._fellows.leave()
            raise

    def together(self, conclude: Callable[[], Result]) -> Result:
        """Do what cannot be undone, once all ranks have come to it. To be called in a job.

        Where ranks vote, that takes ceil(log2 P) rounds more. Whoever has concluded knows that all were ready; so if a
        rank is lost, those that are left conclude it too if any of them has, and else nobody does (`go_on`).
        """
        if self.votes:
            self._undecided = conclude
            team = Team(tuple(range(self._transport.workers)), self._transport.rank)
            knocks = isinstance(self._transport, DirectTransport) and bool(self._transport.watch.knocks)
            said = run(all_gather_numbers(team, [knocks], "agreement to conclude"), self._transport)
            self.heard = bool(said.any())
            self._undecided = None
        result = conclude()
        self.concluded += 1
        return result

    def go_on(self, transport: Transport, concluded: int) -> Any:
        """Work over this transport from now on, after a failure. So many steps count on all ranks.

        Returns:
            What the step that all were ready for came to, if it counts; None if there was none, or it does not.
        """
        conclude, self._undecided = self._undecided, None
        result = None
        most = self.concluded + (conclude is not None)
        assert self.concluded <= concluded <= most, "a step counts of which this rank knows nothing"
        if concluded > self.concluded and conclude is not None:
            result = conclude()
            self.concluded += 1
        else:
            self._sync.abandon()
        self._transport, self.failure, self.heard = transport, None, False
        return result

    def come_back(self, transport: Transport, *, counts: bool, concluded: int) -> Any:
        """Work over this transport from now on, among others that have gone on and have concluded so many steps.

        `counts`: the step that all were ready for when they did, if there was one, counts; what it came to is returned.
        """
        conclude, self._undecided = self._undecided, None
        result = conclude() if counts and conclude is not None else None
        if result is None:
            self._sync.abandon()
        self._transport, self.failure, self.heard, self.concluded = transport, None, False, concluded
        return result

    def abandon(self) -> None:
        """Roll back whatever has begun."""
        self._undecided = None
        self._asking.clear()
        self._sync.abandon()

    def start(self, group: Group, parts: Sequence[Part], terms: Terms) -> None:
        """Accumulate and exchange one group; where there is a thread for it, accumulate while others travel.

        Weights are looked at here and now, and on a device in the caller's stream: their owner goes on to step them.
        """
        if group.of_weights:
            self._accumulate(group, parts, terms)
            self.run(lambda: self._drive(group, steps.exchange(group, terms)))
            return
        if terms.skips or not self._lanes.run_ahead:
            self.run(lambda: self._whole(group, parts, terms))
            return
        added = self._lanes.prepare(lambda: self._accumulate(group, parts, terms))

        def exchange() -> None:
            added.result()
            self._drive(group, steps.exchange(group, terms))

        self.run(exchange)

    def _whole(self, group: Group, parts: Sequence[Part], terms: Terms) -> None:
        self._sync.opens(group)
        self._drive(group, steps.group_step(group, parts, terms))

    def _accumulate(self, group: Group, parts: Sequence[Part], terms: Terms) -> None:
        if self.failure is None:
            self._sync.opens(group)
            steps.accumulate(group, parts, terms)

    def _drive(self, group: Group, program: Program[Outcome], answer: Any = None) -> None:
        """Run a group's program to its end, or until it asks for something, and count what that cost."""
        account, stats = group.memory.frames.account, group.stats
        started, before = time.perf_counter(), self._transport.traffic.copy()
        sent, packed, selected = account.entries, account.seconds, stats.seconds_selecting
        try:
            with record_function("spardl::exchange"):
                asked = run(until_asked(program, answer), self._transport)
        except BaseException as error:
            error.add_note(f"while synchronising the group {stats.name}")
            raise
        stats.entries_sent += account.entries - sent
        ended = time.perf_counter()
        group.span = started if answer is None else group.span[0], ended
        elapsed = ended - started - (stats.seconds_selecting - selected)  # what the step counted itself
        stats.observe(before, self._transport.traffic, elapsed, account.seconds - packed)
        if asked is not None:
            self._asking.append((group, program, asked))

    def complete(self) -> None:
        """Bring the programs of all groups to their end. What some have asked a device for, the host waits for here,
        for all of them at once; on all ranks they go on in one order. To be called in a job."""
        while self._asking:
            asking, self._asking = self._asking, []
            self._transport.arrive()  # for its deadline
            found = answers([asked for _, _, asked in asking])
            for (group, program, _), answer in zip(asking, found, strict=True):
                self._drive(group, program, answer)

    def average(self, tensor: Tensor) -> "Future[Tensor]":
        """Average a tensor that is in no group, as part of the step; sparse COO tensors as well."""
        return self.run(lambda: self._average(tensor))

    def _average(self, tensor: Tensor) -> Tensor:
        here = tensor.layout is torch.strided
        total = bring([tensor], self._transport.device)[0] if here else tensor.to(self._transport.device)
        self._transport.perform(AllReduce(total))
        values = total if total.layout is torch.strided else total.coalesce().values()
        self._sync.health.note(torch.isfinite(values).all())
        return quotient(bring([total], tensor.device)[0], self._transport.workers)

    def finish(self, instead: float) -> bool:
        """Commit the step or roll it back. To be called in a job."""
        self._transport.arrive()
        poisoned = self._fellows is not None and not self._fellows.agree(not self._sync.is_poisoned())
        counts = self._sync.finish(poisoned=poisoned, instead=instead)
        self.aside.join()
        return counts

    def reduce(self, group: Group, tensor: Tensor, step: int | None = None) -> bool:
        """One group's whole step, with steps counted by the group or by the caller; commit it alone. To be called in a
        job."""
        number = group.stats.steps + group.stats.skipped if step is None else step
        terms = Terms(step=number, lazily=self.is_lazy)
        self._whole(group, [Part(name, tensor) for name in group.offsets], terms)
        self.complete()
        return self.finish(torch.nan)
