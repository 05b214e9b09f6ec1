"""Choose: which way of synchronising makes a step shortest. Arithmetic on measured numbers, the same on every rank.

An exchange takes

    rounds x latency + bytes / rate + rest

where rounds and bytes follow from the method's formulas, latency and rate from a probe of the lines, and the rest
(selecting, packing, waiting for a core) is what a timed exchange took beyond that, in proportion to elements. What
backward hides of it comes from the timeline of a step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spardl.planning.candidates import Candidate, Need, need, need_of
from spardl.planning.cost import CostModel, Linear
from spardl.planning.links import Links
from spardl.planning.merge import exact, of_size
from spardl.planning.profile import Profile

# A sparse way has to save at least this share of dense's step: less is noise, and dense learns more from a step.
MARGIN = 0.05
BUCKET_ELEMENTS = 25 * 1024 * 1024 // 4  # of DDP's buckets, but for the first


@dataclass(frozen=True, slots=True)
class Trial:
    """A timed exchange of so many elements: seconds, and bytes that the busiest rank sent."""

    elements: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a trial says about its method beyond the formulas.

    rest     seconds per element that lines do not account for; below 0 where these were quicker than their probe
    traffic  bytes that were sent, over those of the formula
    """

    rest: float = 0.0
    traffic: float = 1.0

    @classmethod
    def of(cls, candidate: Candidate, trial: Trial, links: Links) -> "Calibration":
        formula = need(candidate.config, links.workers, trial.elements)
        traffic = trial.bytes / formula.bytes if trial.bytes and formula.bytes else 1.0
        expected = Need(formula.rounds, formula.bytes * traffic).seconds(links.latency, links.rate)
        return cls((trial.seconds - expected) / trial.elements, traffic)


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds that a rank computes in a step, apart from any exchange, and when gradients are ready, if that is known.

    other    neither forward, backward nor optimizer: loading data, say
    crowded  ranks share cores, so that what an exchange computes delays everything else
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    profile: Profile | None = None
    crowded: bool = False

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer + self.other


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one exchange of a whole model: rounds, bytes, and the rest, which is below 0 where the lines were
    quicker than their probe."""

    startup: float
    moving: float
    rest: float
    bytes: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.startup + self.moving + self.rest)

    @property
    def work(self) -> float:
        """What of it a core is busy with."""
        return max(0.0, self.rest)


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate with what it is predicted to bring.

    step        seconds
    exposed     seconds of it that nothing but the exchange takes
    bytes       that a rank sends in a step
    speedup     over dense gradients
    break_even  bytes per second of a line at which dense is as fast; infinite where dense is never faster, 0 where it
                always is
    timed       whether its own exchange was timed, and not another one of the same method
    measured    whether the step was, in real training
    """

    candidate: Candidate
    step: float
    exposed: float
    bytes: float
    speedup: float
    break_even: float
    timed: bool
    measured: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "title": self.candidate.title,
            "course": self.candidate.course,
            "settings": self.candidate.settings(),
            "step_s": self.step,
            "exposed_s": self.exposed,
            "bytes": self.bytes,
            "speedup_vs_dense": self.speedup,
            "break_even_bytes_per_second": self.break_even if math.isfinite(self.break_even) else None,
            "timed": self.timed,
            "measured": self.measured,
        }


def cost_of(candidate: Candidate, elements: int, links: Links, known: Calibration) -> Cost:
    """What an exchange of so many elements takes."""
    formula = need_of(candidate, links.workers, elements)
    sent = formula.bytes * known.traffic
    return Cost(formula.rounds * links.latency, sent / links.rate, known.rest * elements, sent)


def step_of(candidate: Candidate, cost: Cost, compute: Compute, elements: int) -> float:
    """Seconds of a step with this candidate."""
    rule, profile = candidate.rule, compute.profile
    if rule is not None:
        return compute.total + _exposed_locally(rule.every, rule.delay, cost, compute)
    if profile is None or not (candidate.is_dense or candidate.config.merge):
        return compute.total + cost.seconds
    # DDP sends a bucket when it is full; a planner merges so that backward hides most.
    planner = exact if candidate.config.merge else of_size(BUCKET_ELEMENTS)
    timeline = planner(profile, _groups(cost, elements, compute)).timeline
    return compute.total + timeline.end - profile.backward


def _exposed_locally(every: int, delay: int, cost: Cost, compute: Compute) -> float:
    """Per step: an exchange has `delay` steps to itself, but a core that it needs and others want is not hidden."""
    if not delay:
        return cost.seconds / every
    busy = min(cost.work, cost.seconds) if compute.crowded else 0.0
    waited = max(0.0, cost.seconds - busy - delay * compute.total)
    return (busy + waited) / every


def _groups(cost: Cost, elements: int, compute: Compute) -> CostModel:
    """What groups cost, when the whole costs this: each has its rounds, and the rest is in proportion."""
    moving = max(0.0, cost.seconds - cost.work - cost.startup)
    return CostModel(Linear(0.0, cost.work / elements), Linear(cost.startup, moving / elements), compute.crowded)


def offers(
    candidates: Iterable[Candidate],
    trials: Mapping[Candidate, Trial],
    links: Links,
    compute: Compute,
    elements: int,
) -> list[Offer]:
    """Every candidate with what it should bring, the quickest first; dense gradients must have a trial.

    A candidate without a trial of its own is calibrated by one of the same method, if there is any.
    """
    known = {each: Calibration.of(each, trial, links) for each, trial in trials.items()}
    by_method: dict[str, Calibration] = {}
    for each, found in known.items():
        by_method.setdefault(each.config.method, found)
    plain = Candidate(next(each for each in trials if each.is_dense).config)
    base = cost_of(plain, elements, links, by_method[plain.config.method])
    base_step = step_of(plain, base, compute, elements)
    made = []
    for each in candidates:
        calibration = known.get(each) or by_method.get(each.config.method, Calibration())
        cost = cost_of(each, elements, links, calibration)
        step = step_of(each, cost, compute, elements)
        every = each.rule.every if each.rule is not None else 1
        made.append(
            Offer(
                each,
                step=step,
                exposed=step - compute.total,
                bytes=cost.bytes / every,
                speedup=base_step / step if step > 0 else 1.0,
                break_even=_break_even(cost, base, every),
                timed=each in trials,
            )
        )
    return sorted(made, key=lambda offer: offer.step)


def _break_even(cost: Cost, dense: Cost, every: int) -> float:
    """The rate at which both take as long, if nothing is hidden."""
    fewer = dense.bytes - cost.bytes / every
    longer = (cost.startup + cost.rest) / every - (dense.startup + dense.rest)
    if fewer <= 0:
        return 0.0 if longer > 0 else math.inf
    return fewer / longer if longer > 0 else math.inf


def winner(ranked: Sequence[Offer]) -> Offer:
    """The quickest of one course; dense, where nothing saves a twentieth of its step.

    `ranked` are rivals, dense among them, the quickest first.
    """
    dense = next(offer for offer in ranked if offer.candidate.is_dense)
    best = ranked[0]
    return best if best.step <= (1 - MARGIN) * dense.step else dense
