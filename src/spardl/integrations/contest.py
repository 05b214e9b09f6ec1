"""Contest: the candidates that a survey finds best, in real steps of a rehearsed training, one after the other.

A prediction leaves out what threads, hooks and caches of the very training do. So the finalists, dense among them, each
synchronise the rehearsed model for a few steps, and those steps decide. Only gradients of DDP models have contests, and
only candidates whose steps do not take too long.
"""

import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spardl.agreement import gather_values
from spardl.config import SyncConfig
from spardl.errors import SparDLWarning
from spardl.integrations.auto import AutoSync
from spardl.integrations.rehearsal import Rehearsal
from spardl.planning.candidates import Candidate
from spardl.planning.choose import Compute, Offer, winner
from spardl.planning.review import steps_of
from spardl.planning.survey import Survey, compare, conduct_survey
from spardl.transport.base import Transport
from spardl.transport.choice import transport_named
from spardl.update import LocalUpdates

FINALISTS = 3  # beside dense
SETTLING = 2  # steps of each that do not count
LONGEST_S = 1.0  # of a step that takes part


class Contest:
    """What a rehearsal is for: `survey` and `compute` once it has computed enough, `measured` when all have had their
    steps. Collective, in every part."""

    def __init__(self, asked: SyncConfig, rule: LocalUpdates | None = None) -> None:
        self.survey: Survey | None = None
        self.compute = Compute()
        self.measured: dict[Candidate, float] = {}  # seconds of a step
        self._asked, self._rule = asked, rule
        self._turns: Iterator[tuple[Candidate, bool]] = iter(())
        self._taken: dict[Candidate, list[float]] = {}
        self._now: tuple[Candidate, bool] | None = None
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
        self.survey = conduct_survey(asked, self._rule, transport, sizes, thorough=True)
        model, finalists = rehearsal.model, self._finalists()
        if not isinstance(model, DistributedDataParallel) or optimizer is None or len(finalists) < 2:
            return False
        self._auto = AutoSync(model, optimizer=optimizer, config=asked, chooses=False)
        model.require_backward_grad_sync = True
        self._turns = _turns(finalists)
        return self._next()

    def _finalists(self) -> dict[Candidate, int]:
        """Dense and the best others, as predicted, and how many steps each gets."""
        assert self.survey is not None
        if self._rule is not None:
            return {}
        ranked = [offer for offer in self.survey.rank(self.compute) if offer.step <= LONGEST_S]
        dense = [offer for offer in ranked if offer.candidate.is_dense]
        best = dense + [offer for offer in ranked if not offer.candidate.is_dense][:FINALISTS]
        return {offer.candidate: steps_of(offer.step) for offer in best}

    def _next(self) -> bool:
        before, self._now = self._now, next(self._turns, None)
        if self._now is None:
            self._conclude()
            return False
        candidate = self._now[0]
        if before is None or before[0] != candidate:
            assert self._auto is not None
            with warnings.catch_warnings():  # of what a method does to learning: nobody learns here
                warnings.simplefilter("ignore", SparDLWarning)
                self._auto.become(None if candidate.is_dense else candidate.config)
        return True

    def step(self, seconds: float) -> bool:
        """A step with exchanges has taken so long; whether another one is to follow."""
        assert self._now is not None
        candidate, counts = self._now
        if counts:
            self._taken.setdefault(candidate, []).append(seconds)
        return self._next()

    def _conclude(self) -> None:
        assert self._transport is not None
        mine = [statistics.median(taken) for taken in self._taken.values()]
        everyone = gather_values(self._transport.gather_texts, mine)
        slowest = [max(column) for column in zip(*everyone, strict=True)]
        self.measured = dict(zip(self._taken, slowest, strict=True))

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
        took_part = [offer for offer in rivals if offer.measured]
        dense_is_slow = not any(offer.candidate.is_dense for offer in took_part)
        return took_part[0] if dense_is_slow else winner(took_part), rivals, others


def _turns(steps: dict[Candidate, int]) -> Iterator[tuple[Candidate, bool]]:
    """Whose turn it is, and whether the step counts.

    Dense comes first, while DDP has no hook yet; the others come twice, so that a machine's good and bad seconds fall
    to all of them.
    """
    dense = [each for each in steps if each.is_dense]
    others = [each for each in steps if not each.is_dense]
    for group, share in ((dense, 1), (others, 2), (others, 2)):
        for each in group:
            for turn in range(SETTLING - (-steps[each] // share)):
                yield each, turn >= SETTLING


def with_measured(offers: Sequence[Offer], measured: dict[Candidate, float], compute: Compute) -> list[Offer]:
    """Offers with the steps that were measured instead of predicted ones, the quickest first.

    Sparse gradients that were not measured take as much longer than predicted as those that were.
    """
    dense = next((seconds for candidate, seconds in measured.items() if candidate.is_dense), None)
    beyond = _beyond(offers, measured)
    found = []
    for offer in offers:
        step = measured.get(offer.candidate)
        base = dense if dense is not None else offer.step * offer.speedup
        late = 0.0 if offer.candidate.is_dense or offer.candidate.rule is not None else beyond
        taken = step if step is not None else offer.step + late
        exposed, speedup = taken - compute.total, base / taken if taken > 0 else 1.0
        found.append(replace(offer, step=taken, exposed=exposed, speedup=speedup, measured=step is not None))
    return sorted(found, key=lambda offer: offer.step)


def _beyond(offers: Sequence[Offer], measured: dict[Candidate, float]) -> float:
    """Seconds by which the usual sparse step took longer than predicted."""
    sparse = [offer for offer in offers if offer.candidate in measured and not offer.candidate.is_dense]
    missed = [measured[offer.candidate] - offer.step for offer in sparse]
    return max(0.0, statistics.median(missed)) if missed else 0.0
