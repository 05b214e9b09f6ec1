"""How soon each way came to where dense was: in steps and in seconds, with the ratio to dense's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spardl.cli.curves import Curve, mean_of, reference
from spardl.cli.output import as_figure, as_seconds
from spardl.cli.summary import Summary
from spardl.train.report import Reading

EARLIER = 0.8  # of dense's steps: what it had reached there is a goal beside its end


@dataclass(frozen=True)
class Goal:
    """What dense had reached at a step: one score per seed."""

    step: int
    scores: list[float]


def how_soon(curves: Sequence[Curve]) -> Summary | None:
    """Steps and seconds to each goal; None where there is nothing to compare, or nothing to compare with."""
    dense = reference(curves)
    if dense is None or len(curves) == 1:
        return None
    columns = [("method", [curve.label for curve in curves])]
    for goal in goals_of(dense):
        score = as_figure(dense.runs[0].metric, mean_of(goal.scores))
        steps = [_cell(curve, dense, goal, lambda reading: reading.step, _as_steps) for curve in curves]
        seconds = [_cell(curve, dense, goal, lambda reading: reading.seconds, as_seconds) for curve in curves]
        columns.append((f"steps to {dense.label}'s {score} (step {goal.step:,})", steps))
        columns.append((f"time to {score} (step {goal.step:,})", seconds))
    metric, seeds = dense.runs[0].metric, len(dense.runs)
    by_seed = "; means over seeds, each against dense from the same seed" if seeds > 1 else ""
    return Summary(
        title=f"How soon each came to where {dense.label} was",
        columns=[name for name, _ in columns],
        rows=[list(row) for row in zip(*(cells for _, cells in columns), strict=True)],
        notes=[f"to the first test with that {metric}, and in brackets the ratio to {dense.label}'s own{by_seed}"],
    )


def goals_of(dense: Curve) -> list[Goal]:
    """Its end, and, if it was tested near there, 80 % of its steps."""
    steps = [reading.step for reading in dense.runs[0].readings]
    target = EARLIER * dense.runs[0].steps
    nearest = min(range(len(steps)), key=lambda place: abs(steps[place] - target))
    metric = dense.runs[0].metric
    return [
        Goal(steps[place], [run.readings[place].figures[metric] for run in dense.runs])
        for place in dict.fromkeys((len(steps) - 1, nearest))
    ]


def _cell(
    curve: Curve, dense: Curve, goal: Goal, cost: Callable[[Reading], float], shown: Callable[[float], str]
) -> str:
    """The mean cost over those seeds from which a way came there, and the ratio if it did from all of them."""
    mine, theirs = _costs(curve, goal, cost), _costs(dense, goal, cost)
    reached = [each for each in mine if each is not None]
    if not reached:
        return "never"
    text = shown(mean_of(reached))
    if len(reached) < len(mine):
        return f"{text} ({len(reached)} of {len(mine)} seeds)"
    own = [each for each in theirs if each is not None]
    return text if curve is dense or not sum(own) else f"{text} ({sum(reached) / sum(own):.2f}x)"


def _costs(curve: Curve, goal: Goal, cost: Callable[[Reading], float]) -> list[float | None]:
    found = [run.first_as_good(score) for run, score in zip(curve.runs, goal.scores, strict=True)]
    return [None if reading is None else cost(reading) for reading in found]


def _as_steps(count: float) -> str:
    return f"{count:,.0f}"
