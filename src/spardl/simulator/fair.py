"""Max-min fair rates: nobody can be faster without making somebody slower who is no faster than he.

Bertsekas and Gallager, "Data Networks", 1987: rates rise together until a link is full; its flows keep theirs, and the
others go on. Compiled, since a simulation of a thousand workers asks for rates tens of thousands of times.
"""

import numpy as np
from numpy.typing import NDArray

from spardl.simulator.compiled import compiled

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@compiled
def share(paths: Ints, hops: Ints, flows: Ints, capacity: Floats, rates: Floats) -> None:
    """Set the rates of `flows`; flow f passes the links paths[f, :hops[f]], of `capacity` bytes per second each.

    In each pass every link that is the tightest of all that its flows pass is filled, not only the tightest of all: the
    order among those that share no flow does not matter. Costs the hops of all flows in each pass.
    """
    links = capacity.size
    left, load = capacity.copy(), np.zeros(links, np.int64)
    for f in flows:
        for hop in range(hops[f]):
            load[paths[f, hop]] += 1
    waiting, count = flows.copy(), flows.size
    each, lowest = np.empty(links, np.float64), np.empty(links, np.float64)
    while count:
        for link in range(links):
            if load[link]:
                each[link] = left[link] / load[link]
                lowest[link] = np.inf
        for place in range(count):
            f = waiting[place]
            least = np.inf
            for hop in range(hops[f]):
                least = min(least, each[paths[f, hop]])
            rates[f] = least
            for hop in range(hops[f]):
                lowest[paths[f, hop]] = min(lowest[paths[f, hop]], least)
        still = 0
        for place in range(count):
            f = waiting[place]
            full = False
            for hop in range(hops[f]):
                link = paths[f, hop]
                full |= lowest[link] == each[link]
            if not full:
                waiting[still] = f
                still += 1
                continue
            for hop in range(hops[f]):
                load[paths[f, hop]] -= 1
                left[paths[f, hop]] = max(0.0, left[paths[f, hop]] - rates[f])
        count = still


@compiled
def advance(flows: Ints, remaining: Floats, rates: Floats, seconds: float) -> None:
    """Let `flows` go on at their rates for some seconds."""
    for f in flows:
        remaining[f] -= rates[f] * seconds


@compiled
def first_done(flows: Ints, remaining: Floats, rates: Floats) -> float:
    """Seconds until the first of `flows` is through."""
    least = np.inf
    for f in flows:
        least = min(least, remaining[f] / rates[f])
    return least
