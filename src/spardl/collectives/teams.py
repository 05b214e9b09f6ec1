"""How many teams SparDL should form: the rule. What it is worth is in docs/questions/teams.md.

A step takes, for P workers in d teams, `rounds` messages one after the other and `entries` on the busiest line:

    d a power of two   2 ceil(log2 P/d) + log2 d rounds         k (2 (P - d) + d log2 d) / P entries
    any other d        2 ceil(log2 P/d) + ceil(log2 d) rounds   k (2 (P - d) + h (d - 1)) / P entries

With each doubling of d a round is saved, and from four teams on more entries are sent. So there is one best d for each
ratio of what a round costs to what an entry costs.
"""

import math

from spardl.choices import is_power_of_two

# In B-SAG a team offers h, between 1 and d times k/P entries, so that the union of all offers fills the budget. For
# gradients that overlap little, the simulator settles here.
OFFERED = 1.15

HEADER, COUNT = 8.0, 1.0  # bytes of a message, and of a block in it
VALUE, GAP = 16.0, 1.6  # bits of a value, and of an index beyond log2 of the elements per entry


def team_counts(workers: int) -> list[int]:
    """Every number of equal teams that so many workers can form."""
    return [count for count in range(1, workers + 1) if workers % count == 0]


def rounds(workers: int, teams: int) -> int:
    """Messages that follow one another in a step."""
    return 2 * _log2(workers // teams) + _log2(teams)


def entries_sent(workers: int, teams: int, entries: int) -> float:
    """Entries that the busiest worker sends in a step that agrees on `entries`."""
    scattered = 2 * (workers - teams)
    between = teams * _log2(teams) if is_power_of_two(teams) else OFFERED * (teams - 1)
    return entries * (scattered + between) / workers


def bytes_sent(workers: int, teams: int, entries: int, density: float) -> float:
    """The same in bytes, as frames of bf16 values have them: a header a message, a count a block."""
    if is_power_of_two(teams):
        between = _log2(teams) * bytes_between(workers, teams, entries, density)
    else:
        offered = OFFERED * (teams - 1) * entries / workers
        between = _log2(teams) * HEADER + (teams - 1) * COUNT + offered * entry_bits(density) / 8
    return bytes_within(workers, teams, entries, density) + between


def bytes_within(workers: int, teams: int, entries: int, density: float) -> float:
    """What of it stays in a worker's own team: all but one block, scattered and gathered."""
    size = workers // teams
    frames = 2 * _log2(size) * HEADER + 2 * (size - 1) * COUNT
    return frames + entries * 2 * (workers - teams) / workers * entry_bits(density) / 8


def bytes_between(workers: int, teams: int, entries: int, density: float) -> float:
    """A message from team to team, by recursive doubling: one block."""
    return HEADER + COUNT + entries * teams / workers * entry_bits(density) / 8


def entry_bits(density: float) -> float:
    """Of a bf16 value and its Rice-coded index, on average: 24.2 at 1 %, 27.6 at 0.1 %."""
    return VALUE + math.log2(1 / density) + GAP


def seconds(workers: int, teams: int, entries: int, density: float, *, per_round: float, per_byte: float) -> float:
    """What a step takes on lines of their own."""
    return rounds(workers, teams) * per_round + bytes_sent(workers, teams, entries, density) * per_byte


def best_teams(workers: int, entries: int, density: float, *, per_round: float, per_byte: float) -> int:
    """The power of two of teams whose step is shortest; of equals the smallest, but two before one.

    Powers of two only: they agree by R-SAG, in which every team's whole budget takes part. By B-SAG any number can, for
    fewer entries still, but because each team offers few: that is another selection, and not only another price.

    Args:
        workers: how many.
        entries: that a step agrees on: density times elements.
        density: of the step.
        per_round: seconds that a message takes beside its bytes: latency, and what both hosts do for it.
        per_byte: seconds that a line takes for a byte.
    """
    counts = [count for count in team_counts(workers) if is_power_of_two(count)]
    counts.sort(key=lambda count: (count != 2, count))
    price = {"per_round": per_round, "per_byte": per_byte}
    return min(counts, key=lambda count: seconds(workers, count, entries, density, **price))


def _log2(count: int) -> int:
    return math.ceil(math.log2(count))
