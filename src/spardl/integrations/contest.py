"""Contest: the candidates that a survey finds best, in real steps of a rehearsed training, in turns.

A prediction leaves out what threads, hooks and caches of the very training do. So the finalists, dense among them, each
synchronise the rehearsed model for a few steps, and those steps decide. Only gradients of DDP models have contests, and
only candidates whose steps do not take too long. Rehearsal, survey and contest together keep to a budget.
"""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spardl.agreement import gather_values
from spardl.config import SyncConfig
from spardl.errors import SparDLWarning
from spardl.integrations.auto import AutoSync
from spardl.integrations.rehearsal import Rehearsal
from spardl.planning.budget import Budget
from spardl.planning.candidates import Candidate
from spardl.planning.choose import Compute, Offer, winner
from spardl.planning.rounds import Rounds, Turn, finalists
from spardl.planning.survey import Survey, compare, conduct_survey
from spardl.transport.base import Transport
from spardl.transport.choice import transport_named
from spardl.update import LocalUpdates

PLAN_S = 25.0  # from the rehearsal to the last turn
SURVEY_S, SURVEY_SHARE = 8.0, 0.3  # at most, also of what the rehearsal has left
LONGEST_S = 1.0  # of a step that takes part


class Contest:
    """What a rehearsal is for: `survey` and `compute` once it has computed enough, `measured` when all have had their
    steps. Collective, in every part."""

    def __init__(self, asked: SyncConfig, rule: LocalUpdates | None = None, budget: Budget | None = None) -> None:
        self.survey: Survey | None = None
        self.compute = Compute()
        self.measured: dict[Candidate, float] = {}  # seconds of a step
        self._asked, self._rule = asked, rule
        self._budget = budget if budget is not None else Budget(PLAN_S)
        self._rounds = Rounds({})
        self._turn: Turn | None = None
        self._seconds: list[float] = []  # of the steps of this turn
        self._transport: Transport | None = None
        self._auto: AutoSync | None = None

    def begin(self, rehearsal: Rehearsal, optimizer: Optimizer | None) -> bool:
        """The model has computed enough; whether steps with exchanges are to follow."""
        asked = self._asked
        transport = transport_named(
            asked.transport, None, timeout=asked.timeout, device=rehearsal.device, encrypt=asked.encrypt
        )
        self._transport, self.compute = transport, rehearsal.compute(transport)
        sizes = list(rehearsal.sizes.values())
        seconds = min(SURVEY_S, SURVEY_SHARE * self._budget.left(transport.gather_texts))
        self.survey = conduct_survey(asked, self._rule, transport, sizes, thorough=seconds)
        model, predicted = rehearsal.model, self._finalists()
        if not isinstance(model, DistributedDataParallel) or optimizer is None or len(predicted) < 2:
            return False
        self._auto = AutoSync(model, optimizer=optimizer, config=asked, chooses=False)
        model.require_backward_grad_sync = True
        self._rounds = Rounds(predicted)
        return self._next()

    def _finalists(self) -> dict[Candidate, float]:
        """Dense and the best others, and the steps that are predicted for them."""
        assert self.survey is not None
        if self._rule is not None:
            return {}
        ranked = [offer for offer in self.survey.rank(self.compute) if offer.step <= LONGEST_S]
        dense = [offer for offer in ranked if offer.candidate.is_dense]
        sparse = [offer for offer in ranked if not offer.candidate.is_dense]
        best = dense + (sparse[: finalists(sparse[0].step)] if sparse else [])
        return {offer.candidate: offer.step for offer in best}

    def _next(self) -> bool:
        """Begin the next turn, if there is time for one."""
        assert self._transport is not None and self._auto is not None
        before, self._seconds = self._turn, []
        self._turn = self._rounds.next(self._budget.left(self._transport.gather_texts))
        if self._turn is None:
            self.measured = self._rounds.measured
            return False
        candidate = self._turn.candidate
        if before is None or before.candidate != candidate:
            with warnings.catch_warnings():  # of what a method does to learning: nobody learns here
                warnings.simplefilter("ignore", SparDLWarning)
                self._auto.become(None if candidate.is_dense else candidate.config)
        return True

    def step(self, seconds: float) -> bool:
        """A step with exchanges has taken so long; whether another one is to follow."""
        assert self._turn is not None and self._transport is not None
        self._seconds.append(seconds)
        if len(self._seconds) < self._turn.settling + self._turn.counted:
            return True
        everyone = gather_values(self._transport.gather_texts, self._seconds[self._turn.settling :])
        self._rounds.note(self._turn.candidate, [max(column) for column in zip(*everyone, strict=True)])
        return self._next()

    def result(self) -> tuple[Offer, list[Offer], list[Offer]]:
        """The winner, all of its course, the quickest first, and what the best would bring on other courses."""
        assert self.survey is not None
        best, rivals, others = compare(self.survey, self.compute)
        if self._transport is not None:
            self._transport.close()
        if not self.measured:
            return best, rivals, others
        corrected = with_measured([*rivals, *others], self.measured, self.compute)
        ours = {offer.candidate for offer in rivals}
        rivals = [offer for offer in corrected if offer.candidate in ours]
        others = [offer for offer in corrected if offer.candidate not in ours]
        took_part = [offer for offer in rivals if offer.measured or offer.candidate.is_dense]
        return winner(took_part), rivals, others


def with_measured(offers: Sequence[Offer], measured: dict[Candidate, float], compute: Compute) -> list[Offer]:
    """Offers with the steps that were measured instead of predicted ones, the quickest first.

    What was not measured takes as much longer than predicted as what was: a dense exchange as DDP's, a sparse one as
    the usual one. Else a prediction would look quicker than a measurement for leaving out what only steps show.
    """
    dense = next((seconds for candidate, seconds in measured.items() if candidate.is_dense), None)
    late = {is_dense: _beyond(offers, measured, is_dense) for is_dense in (True, False)}
    found = []
    for offer in offers:
        step = measured.get(offer.candidate)
        base = dense if dense is not None else offer.step * offer.speedup
        every = offer.candidate.rule.every if offer.candidate.rule is not None else 1
        taken = step if step is not None else offer.step + late[offer.candidate.is_dense] / every
        exposed, speedup = taken - compute.total, base / taken if taken > 0 else 1.0
        found.append(replace(offer, step=taken, exposed=exposed, speedup=speedup, measured=step is not None))
    return sorted(found, key=lambda offer: offer.step)


def _beyond(offers: Sequence[Offer], measured: dict[Candidate, float], is_dense: bool) -> float:
    """Seconds by which the usual step of dense, or of sparse ways, took longer than predicted."""
    alike = [offer for offer in offers if offer.candidate in measured and offer.candidate.is_dense == is_dense]
    missed = [measured[offer.candidate] - offer.step for offer in alike]
    return max(0.0, statistics.median(missed)) if missed else 0.0
