"""The choice is arithmetic: rounds, bytes and what was timed, the same on every rank."""

import math

import pytest

from spardl.config import SyncConfig
from spardl.planning.candidates import Candidate, by_teams, need, others, rivals
from spardl.planning.choose import (
    MARGIN,
    Calibration,
    Compute,
    Cost,
    Trial,
    cost_of,
    offers,
    step_of,
    winner,
)
from spardl.planning.links import Links
from spardl.planning.profile import Layer, Profile
from spardl.update import LocalUpdates

DENSE = Candidate(SyncConfig(method="dense", density=1.0))
SPARDL = Candidate(SyncConfig(method="spardl", density=0.01, teams=2))
TOPKA = Candidate(SyncConfig(method="topka", density=0.01))


def links(latency: float = 1e-4, rate: float = 1.25e8, workers: int = 4) -> Links:
    return Links.uniform(workers, latency=latency, rate=rate)


def test_an_exchange_needs_what_its_formula_says() -> None:
    """Dense sends 2(P-1)/P of everything in 2(P-1) rounds; TopkA its entries to all others in log2 P."""
    dense, topka = need(DENSE.config, 4, 1000), need(TOPKA.config, 4, 100_000)
    assert (dense.rounds, dense.bytes) == (6, 6000)
    assert topka.rounds == 2
    assert topka.bytes == pytest.approx(3 * 1000 * (16 + math.log2(100) + 1.46) / 8)


def test_a_single_worker_needs_nothing() -> None:
    assert need(SPARDL.config, 1, 1000).seconds(1.0, 1.0) == 0.0


def test_what_a_trial_took_beyond_its_lines_grows_with_the_model() -> None:
    trial = Trial(1000, seconds=0.5, bytes=0.0)
    known = Calibration.of(DENSE, trial, links(latency=0.0, rate=6e4))  # the lines account for 0.1 s
    cost = cost_of(DENSE, 4000, links(latency=0.0, rate=6e4), known)
    assert (cost.moving, cost.rest) == (pytest.approx(0.4), pytest.approx(1.6))
    assert cost.seconds == pytest.approx(2.0)


def test_bytes_are_those_that_were_sent() -> None:
    known = Calibration.of(DENSE, Trial(1000, 1.0, bytes=12_000.0), links())
    assert known.traffic == 2.0 and cost_of(DENSE, 2000, links(), known).bytes == 24_000


def test_the_quickest_comes_first_and_says_by_how_much() -> None:
    trials = {DENSE: Trial(1000, 1.0, 0.0), SPARDL: Trial(1000, 0.25, 0.0), TOPKA: Trial(1000, 0.5, 0.0)}
    ranked = offers(trials, trials, links(), Compute(forward=0.1, backward=0.1), 1000)
    assert [offer.candidate for offer in ranked] == [SPARDL, TOPKA, DENSE]
    assert ranked[0].speedup == pytest.approx(1.2 / 0.45) and ranked[0].exposed == pytest.approx(0.25)
    assert winner(ranked).candidate == SPARDL and all(offer.timed for offer in ranked)


def test_dense_wins_where_little_is_saved() -> None:
    """A sparse step learns less from its batch: for less than a twentieth it is not worth it."""
    saved = MARGIN / 2
    trials = {DENSE: Trial(1000, 1.0, 0.0), SPARDL: Trial(1000, 1.0 - saved, 0.0)}
    ranked = offers(trials, trials, links(), Compute(), 1000)
    assert ranked[0].candidate == SPARDL and winner(ranked).candidate == DENSE


def test_the_break_even_rate_is_where_both_take_as_long() -> None:
    trials = {DENSE: Trial(10**6, 0.1, 0.0), SPARDL: Trial(10**6, 0.08, 0.0)}
    (offer,) = (each for each in offers(trials, trials, links(), Compute(), 10**6) if each.candidate == SPARDL)
    known = {each: Calibration.of(each, trial, links()) for each, trial in trials.items()}
    there = links(rate=offer.break_even)
    sparse, dense = (cost_of(each, 10**6, there, known[each]).seconds for each in (SPARDL, DENSE))
    assert sparse == pytest.approx(dense) and offer.break_even > links().rate


def test_what_is_quicker_in_everything_has_no_break_even() -> None:
    trials = {DENSE: Trial(1000, 1.0, 0.0), SPARDL: Trial(1000, 0.01, 0.0)}
    (offer,) = (each for each in offers(trials, trials, links(), Compute(), 1000) if each.candidate == SPARDL)
    assert math.isinf(offer.break_even) and offer.to_dict()["break_even_bytes_per_second"] is None


def test_other_densities_are_judged_by_the_trial_of_their_method() -> None:
    less = Candidate(SyncConfig(method="topka", density=0.001))
    trials = {DENSE: Trial(1000, 1.0, 0.0), TOPKA: Trial(10**5, 0.5, 0.0)}
    (offer,) = offers([less], trials, links(rate=1e4), Compute(), 10**5)
    (timed,) = offers([TOPKA], trials, links(rate=1e4), Compute(), 10**5)
    assert not offer.timed and offer.step < timed.step


COST = Cost(startup=0.01, moving=0.2, rest=0.05, bytes=1.0)


def test_local_updates_pay_every_so_many_steps_and_hide_behind_the_next() -> None:
    compute = Compute(forward=0.1, backward=0.1)
    config = SPARDL.config
    every = Candidate(config, LocalUpdates(every=5))
    late = Candidate(config, LocalUpdates(every=1, delay=1))
    assert step_of(every, COST, compute, 1000) == pytest.approx(0.2 + 0.26 / 5)
    assert step_of(late, COST, compute, 1000) == pytest.approx(0.26)


def test_what_an_exchange_computes_is_not_hidden_where_ranks_share_cores() -> None:
    late = Candidate(SPARDL.config, LocalUpdates(delay=1))
    crowded = Compute(forward=0.5, crowded=True)
    assert step_of(late, COST, crowded, 1000) == pytest.approx(0.5 + 0.05)
    assert step_of(late, COST, Compute(forward=0.5), 1000) == pytest.approx(0.5)


def test_merged_groups_and_buckets_hide_behind_backward() -> None:
    layers = tuple(Layer(str(place), 10**7, 0.2) for place in range(4))
    compute = Compute(forward=0.1, backward=0.8, profile=Profile(layers, 0.1))
    elements = 4 * 10**7
    merged = Candidate(SyncConfig(method="spardl", density=0.01, merge="exact"))
    single = step_of(SPARDL, COST, compute, elements)
    assert single == pytest.approx(0.9 + 0.26)
    assert 0.9 < step_of(merged, COST, compute, elements) < single
    assert 0.9 < step_of(DENSE, COST, compute, elements) < single


# --- candidates -------------------------------------------------------------------------------------------------------


def test_rivals_are_of_one_course_and_dense_is_among_them() -> None:
    asked = SyncConfig(density=0.02, values="int8")
    found = list(rivals(asked, None, links(), 10**6))
    assert found[0].is_dense and {"spardl", "topka", "gtopk", "oktopk", "exdyna"} <= {c.config.method for c in found}
    assert {each.course for each in found[1:]} == {"gradients, 2 % in int8"}


def test_team_counts_are_tried_by_what_their_messages_take() -> None:
    """Where a message takes long, many small teams; where bytes do, few rounds more are worth it."""
    asked = SyncConfig(density=0.01)
    far = by_teams(asked, links(latency=0.05, rate=1e9, workers=8), 10**6)
    thin = by_teams(asked, links(latency=1e-6, rate=1e5, workers=8), 10**6)
    assert far[0].teams_of(8) == 8 and thin[0].teams_of(8) in (1, 2)
    assert [each.teams_of(8) for each in by_teams(SyncConfig(teams=4), links(workers=8), 1000)] == [4]


def test_other_courses_are_told_apart_from_the_one_that_was_asked_for() -> None:
    found = list(others(SPARDL.config, None))
    assert all(each.course != SPARDL.course for each in found)
    assert {
        "local updates every 5, 1 late, 1 % in bf16",
        "gradients, 0.1 % in bf16",
        "gradients, everything in fp16",
    } <= {each.course for each in found}


def test_a_candidate_says_how_to_get_it() -> None:
    """Only what differs from the defaults is written."""
    assert SPARDL.settings() == {"method": "spardl", "density": 0.01, "teams": 2}
    late = Candidate(SPARDL.config, LocalUpdates(every=5, delay=1))
    assert late.python() == (
        "sync = spardl.attach(model, optimizer=optimizer, method='spardl', density=0.01, teams=2, update='local',"
        " every=5, delay=1)"
    )
    assert "DistributedDataParallel(model)" in DENSE.python()


def two_racks(order: tuple[int, ...]) -> Links:
    """Four ranks in two racks, numbered as given."""
    rack = {rank: place // 2 for place, rank in enumerate(order)}
    latencies = tuple(
        tuple(None if a == b else 1e-4 if rack[a] == rack[b] else 0.02 for b in range(4)) for a in range(4)
    )
    return Links(latencies, links().rates)


def test_ranks_that_are_close_form_a_team() -> None:
    """In the order that puts them side by side, where they are not numbered so."""
    first = by_teams(SyncConfig(), two_racks((0, 2, 1, 3)), 10**6)[0]
    assert first.options.teams == 2 and first.options.order == (0, 2, 1, 3)
    assert "placed by nearness" in Candidate(first).title
    assert by_teams(SyncConfig(), two_racks((0, 1, 2, 3)), 10**6)[0].options.order == "numbered"
