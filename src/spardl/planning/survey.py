"""Survey: what a network and its ranks can do for a model of a given size. Collective; all ranks learn the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spardl.config import SyncConfig
from spardl.machine import cores_per_rank
from spardl.planning import links as lines
from spardl.planning.budget import Budget
from spardl.planning.candidates import Candidate, others, rivals
from spardl.planning.choose import Calibration, Compute, Offer, Trial, cost_of, offers, winner
from spardl.planning.links import Links
from spardl.planning.probe import MIN_CORES_PER_RANK
from spardl.planning.trials import conduct
from spardl.transport.base import Transport
from spardl.update import LocalUpdates

QUICK_S = 1.5  # for trials
LEAST_S = 0.2  # for a few of them, however little time there is
FINALS = 0.5  # share of a thorough survey's seconds that those which came out best have to themselves, beside dense
QUICK = ("spardl", "topka", "gtopk")  # what has been quickest anywhere (docs/performance.md, docs/will-it-help.md)
AT_ONCE = 4  # trials side by side: each has buffers of the model's size
MERGE = "exact"


@dataclass(frozen=True)
class Survey:
    """The lines, the exchanges that were timed on them, and whether ranks share cores."""

    links: Links
    trials: dict[Candidate, Trial]
    elements: int
    crowded: bool

    def rank(self, compute: Compute, candidates: Sequence[Candidate] = ()) -> list[Offer]:
        """Those that were timed, or these, with what they bring to a step that computes so long; the quickest first."""
        crowded = replace(compute, crowded=self.crowded)
        return offers(candidates or list(self.trials), self.trials, self.links, crowded, self.elements)

    def exchange(self, candidate: Candidate) -> float:
        """Seconds of one exchange of the whole model by one that was timed."""
        known = Calibration.of(candidate, self.trials[candidate], self.links)
        return cost_of(candidate, self.elements, self.links, known).seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {"links": self.links.to_dict(), "elements": self.elements, "crowded": self.crowded}


def conduct_survey(
    asked: SyncConfig,
    rule: LocalUpdates | None,
    transport: Transport,
    sizes: Sequence[int],
    *,
    thorough: float | None = None,
) -> Survey:
    """Probe the lines, and time dense and its rivals on tensors of these sizes: those likely to win, or, if it is to be
    thorough, in so many seconds, all of them."""
    elements, budget = sum(sizes), Budget(thorough or 0.0)
    links = lines.probe(transport, all_pairs=False if thorough is None else None)
    dense, *sparse = list(rivals(asked, rule, links, elements))
    crowded = cores_per_rank(transport.gather_texts) < MIN_CORES_PER_RANK
    if thorough is None:
        likely = [next(each for each in sparse if each.config.method == method) for method in QUICK]
        trials = conduct([dense, *likely], transport, links, sizes, seconds=QUICK_S)
    else:
        trials = _in_time(dense, sparse, transport, links, sizes, budget, FINALS * thorough)
    return Survey(links, trials, elements, crowded)


def _in_time(
    dense: Candidate,
    sparse: Sequence[Candidate],
    transport: Transport,
    links: Links,
    sizes: Sequence[int],
    budget: Budget,
    finals: float,
) -> dict[Candidate, Trial]:
    """Trials of all, a few at a time, and then once more of those that came out best, beside dense.

    Those likely to win come first: if time runs out, the others are left out.
    """
    trials: dict[Candidate, Trial] = {}
    waiting = sorted(sparse, key=lambda each: each.config.method not in QUICK)
    while waiting:
        left = budget.left(transport.gather_texts) - finals
        if trials and left <= 0:
            break
        group, rest = waiting[:AT_ONCE], waiting[AT_ONCE:]
        seconds = max(LEAST_S, left * len(group) / len(waiting))
        trials |= conduct(group, transport, links, sizes, seconds=seconds)
        waiting = rest
    best = sorted(trials, key=lambda each: trials[each].seconds / trials[each].elements)[: AT_ONCE - 1]
    seconds = max(LEAST_S, budget.left(transport.gather_texts))
    return trials | conduct([dense, *best], transport, links, sizes, seconds=seconds)


def begin_with(survey: Survey) -> tuple[Candidate, Candidate]:
    """What should be quickest, judged by exchanges alone, and the quickest sparse way, which may be the same."""
    ranked = survey.rank(Compute())
    return winner(ranked).candidate, next(offer.candidate for offer in ranked if not offer.candidate.is_dense)


def compare(survey: Survey, compute: Compute) -> tuple[Offer, list[Offer], list[Offer]]:
    """The winner, its rivals of one course, and what the best of them would bring on other courses."""
    timed = list(survey.trials)
    best = next(offer.candidate for offer in survey.rank(compute) if not offer.candidate.is_dense)
    if best.rule is None and compute.profile is not None:
        timed.append(replace(best, config=replace(best.config, merge=MERGE)))
    ranked = survey.rank(compute, timed)
    elsewhere = survey.rank(compute, list(others(best.config, best.rule)))
    return winner(ranked), ranked, elsewhere
