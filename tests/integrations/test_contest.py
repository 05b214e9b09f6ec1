"""Finalists are judged by real steps of the rehearsed training; what was not measured is corrected by what was."""

import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from processes import on_processes
from spardl.config import SyncConfig
from spardl.integrations import contest as contests
from spardl.integrations.contest import Contest, with_measured
from spardl.integrations.rehearsal import LEAST_STEPS, MOST_STEPS, WARM_UP, rehearse
from spardl.planning import rounds, survey
from spardl.planning.budget import Budget
from spardl.planning.candidates import Candidate
from spardl.planning.choose import Compute, Offer
from spardl.update import LocalUpdates
from training import mlp, sgd, train, weights_of

DENSE = Candidate(SyncConfig(method="dense", density=1.0))
TOPKA, GTOPK = (Candidate(SyncConfig(method=method)) for method in ("topka", "gtopk"))


def offer(candidate: Candidate, step: float) -> Offer:
    return Offer(candidate, step, step, bytes=1.0, speedup=2.0, break_even=1.0, timed=True)


def test_measured_steps_take_the_place_of_predicted_ones() -> None:
    found = with_measured(
        [offer(TOPKA, 0.1), offer(GTOPK, 0.15), offer(DENSE, 0.2)], {TOPKA: 0.4, DENSE: 0.3}, Compute(forward=0.05)
    )
    assert [(each.candidate, each.measured) for each in found] == [(DENSE, True), (TOPKA, True), (GTOPK, False)]
    assert [each.step for each in found] == pytest.approx([0.3, 0.4, 0.45])
    assert found[1].speedup == pytest.approx(0.75) and found[1].exposed == pytest.approx(0.35)


def test_a_prediction_does_not_win_over_a_measurement_by_what_only_steps_show() -> None:
    """Dense took 0.1 s longer than predicted, and so does every other dense exchange; every fifth step, a fifth."""
    seldom = Candidate(DENSE.config, LocalUpdates(every=5))
    halved = Candidate(SyncConfig(method="dense", density=1.0, values="fp16"))
    found = with_measured([offer(DENSE, 0.2), offer(seldom, 0.1), offer(halved, 0.15)], {DENSE: 0.3}, Compute())
    assert {each.candidate: each.step for each in found} == pytest.approx({DENSE: 0.3, seldom: 0.12, halved: 0.25})


def contested(rank, workers):
    contests.SURVEY_S = 0.1
    contests.PLAN_S = 1000.0
    contests.LONGEST_S = 100.0
    rounds.ENOUGH = 10
    rounds.CLOSE = rounds.FAR = 1000.0  # so that dense comes once more at the end, and the model changes over twice
    held = Contest(SyncConfig(density=0.05, dense_below=0))
    steps = []

    def body():
        model = DistributedDataParallel(mlp(seed=0))
        optimizer = sgd(model, momentum=0.9)
        for step in itertools.count():
            train(model, optimizer, [step])
            steps.append(weights_of(model))

    rehearsal = rehearse(body, held)
    best, rivals, others = held.result()
    raced = [each for each in rivals if each.measured]
    return best.candidate.settings(), len(raced), len(others), rehearsal.sizes, len(steps), held.measured


def test_dense_and_the_best_others_have_steps_of_their_own_and_all_ranks_find_the_same() -> None:
    outcomes = on_processes(2, contested)
    assert all(each[0] == outcomes[0][0] and each[5] == outcomes[0][5] for each in outcomes)
    for _, raced, others, sizes, steps, measured in outcomes:
        assert raced == len(measured) >= 1 + rounds.LEAST_FINALISTS and others > 5
        assert sum(sizes.values()) == sum(each.numel() for each in mlp().parameters())
        assert steps >= WARM_UP + LEAST_STEPS + raced * (rounds.SETTLING + rounds.LEAST_COUNTED) - 1


def without_ddp(rank, workers):
    contests.SURVEY_S = 0.1
    held = Contest(SyncConfig(density=0.05, dense_below=0))

    def body():
        model = mlp()
        watched.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, range(100))

    from spardl.integrations.rehearsal import Enough, Rehearsal

    watched = Rehearsal(held)
    with watched.watching(), pytest.raises(Enough):
        body()
    return held.measured, held.result()[0].measured


def test_without_ddp_the_survey_decides() -> None:
    assert all(measured == {} and not decided for measured, decided in on_processes(2, without_ddp))


def out_of_time(rank, workers):
    """What was measured, how many steps there were, and what was timed, when a rank's time is over before it begins."""
    held, steps = Contest(SyncConfig(density=0.05, dense_below=0), budget=Budget(-1.0 if rank else 1000.0)), []

    def body():
        model = DistributedDataParallel(mlp(seed=0))
        optimizer = sgd(model, momentum=0.9)
        for step in itertools.count():
            train(model, optimizer, [step])
            steps.append(step)

    rehearse(body, held)
    return held.measured, len(steps), {each.config.method for each in held.survey.trials}, held.result()[0].measured


def test_when_time_is_over_on_one_rank_a_few_trials_decide_on_all() -> None:
    outcomes = on_processes(2, out_of_time)
    assert all(each == outcomes[0] for each in outcomes)
    measured, steps, timed, decided = outcomes[0]
    assert measured == {} and not decided and steps <= WARM_UP + MOST_STEPS
    assert timed == {"dense", *survey.QUICK}
