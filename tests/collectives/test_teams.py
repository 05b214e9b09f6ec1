"""The rule of team counts: it prices as the methods do, and takes what is cheapest."""

import pytest

from spardl.collectives.methods.spardl import SparDL
from spardl.collectives.teams import best_teams, bytes_sent, entries_sent, rounds, seconds, team_counts
from spardl.simulator.simulation import simulate


@pytest.mark.parametrize("workers", [1, 2, 6, 12, 16, 64])
def test_rounds_and_entries_are_those_that_the_method_says_of_itself(workers):
    for teams in team_counts(workers):
        price = {"P": workers, "d": teams, "k": 1000}
        assert (rounds(workers, teams),) * 2 == SparDL.about.rounds.range(**price)
        least, most = SparDL.about.entries.range(**price)
        if teams & (teams - 1) == 0:
            assert entries_sent(workers, teams, 1000) == pytest.approx(least)
        assert entries_sent(workers, teams, 1000) <= 1.2 * most


@pytest.mark.parametrize(
    "workers,per_round,per_byte,teams",
    [
        (16, 1.0, 0.0, 16),  # where only rounds cost, one worker a team saves most of them
        (16, 0.0, 1.0, 2),  # where only entries cost, two teams are as cheap as one
        (7, 0.0, 1.0, 1),
        (7, 1.0, 0.0, 1),  # no other power of two divides seven
        (12, 1.0, 0.0, 4),
        (1, 1.0, 1.0, 1),
        (16, 0.0, 0.0, 2),  # where nothing costs anything, the usual
    ],
)
def test_the_rule_takes_what_is_cheapest(workers, per_round, per_byte, teams):
    assert best_teams(workers, 10**6, 0.01, per_round=per_round, per_byte=per_byte) == teams


def test_with_the_price_of_a_round_the_number_of_teams_rises():
    found = [best_teams(64, 1000, 0.01, per_round=10.0**power, per_byte=1e-3) for power in range(-6, 3)]
    assert found == sorted(found) and found[0] < found[-1]


def test_no_power_of_two_is_cheaper_than_the_one_chosen():
    for workers in (6, 8, 12, 24):
        price = {"per_round": 0.3, "per_byte": 1e-3}
        best = best_teams(workers, 1000, 0.01, **price)
        powers = [teams for teams in team_counts(workers) if teams in (1, 2, 4, 8, 16)]
        times = {teams: seconds(workers, teams, 1000, 0.01, **price) for teams in powers}
        assert times[best] == min(times.values())


@pytest.mark.parametrize("teams", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_bytes_are_those_of_the_simulated_frames(teams, density):
    report = simulate(workers=16, elements=100_000, density=density, teams=teams)
    assert bytes_sent(16, teams, round(density * 100_000), density) == pytest.approx(report.bytes_sent_max, rel=0.05)
