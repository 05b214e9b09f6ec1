"""Trials: exchanges of candidates, timed on the ranks and lines at hand, side by side.

Collective: all ranks time the same exchanges in turns, and the slowest rank counts, so that all hold the same numbers.
Each candidate has a session of its own on a connection that is there; nothing of a model is touched.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spardl.agreement import gather_values
from spardl.collectives.program import AllReduce
from spardl.kernels.cpu.crew import Crew
from spardl.machine import cores_per_rank
from spardl.planning.candidates import FLOAT_BYTES, Candidate, need
from spardl.planning.choose import Trial
from spardl.planning.links import Links
from spardl.sync.landing import take_landings
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session
from spardl.transport.base import Transport

LARGEST = 1 << 21  # elements; more takes as much longer
LEAST_TURNS, MOST_TURNS = 2, 9
WARM_UP = 2  # exchanges that do not count: buffers are made, selection finds its thresholds
BUCKET_BYTES = 25 << 20  # as DDP sends a dense gradient
NAME = "trial"

Exchange = Callable[[], None]


def conduct(
    candidates: Sequence[Candidate],
    transport: Transport,
    links: Links,
    sizes: Sequence[int],
    *,
    seconds: float,
) -> dict[Candidate, Trial]:
    """Time each of them on tensors of these sizes, for about so many seconds in all. Collective, between steps."""
    share = seconds / max(1, len(candidates)) / (WARM_UP + LEAST_TURNS)
    found: dict[Candidate, Trial] = {}
    crew = Crew.for_cores(cores_per_rank(transport.gather_texts))
    elements = sum(sizes)
    parts = {each: _scaled(sizes, _affordable(each, links, elements, share)) for each in candidates}
    source = _gradient(transport, max(map(sum, parts.values()), default=0))
    rigs = {each: _Rig(each, transport, parts[each], crew, source) for each in candidates}
    try:
        warm = {each: [rig.time() for _ in range(WARM_UP)][-1] for each, rig in rigs.items()}
        once = sum(_largest(transport, list(warm.values())))
        turns = int(min(MOST_TURNS, max(LEAST_TURNS, seconds / max(once, 1e-6) - WARM_UP)))
        taken: dict[Candidate, list[float]] = {each: [] for each in candidates}
        for _ in range(turns):
            for each, rig in rigs.items():
                taken[each].append(rig.time())
        medians = _largest(transport, [statistics.median(taken[each]) for each in candidates])
        sent = _largest(transport, [rigs[each].bytes_sent for each in candidates])
        for each, median, size in zip(candidates, medians, sent, strict=True):
            found[each] = Trial(rigs[each].elements, median, size)
    finally:
        for rig in rigs.values():
            rig.end()
    return found


def _affordable(candidate: Candidate, links: Links, elements: int, seconds: float) -> int:
    """As many elements as an exchange moves in so many seconds, up to all of them."""
    most = min(elements, LARGEST)
    wanted = need(candidate.config, links.workers, most)
    free = seconds - wanted.rounds * links.latency
    moving = wanted.bytes / links.rate
    if moving <= max(free, 0.0) or not math.isfinite(moving):
        return most
    return max(min(most, candidate.config.dense_below, 1024), int(most * max(free, 0.1 * seconds) / moving))


def _scaled(sizes: Sequence[int], elements: int) -> list[int]:
    """As many tensors, smaller in proportion, none of them empty."""
    return [max(1, size * elements // sum(sizes)) for size in sizes]


def _gradient(transport: Transport, elements: int) -> Tensor:
    """One of so many elements, of which a few are large; each rank has its own."""
    generator = torch.Generator().manual_seed(transport.rank)
    return torch.randn(elements, generator=generator).pow_(3).to(torch.device(transport.device))


def _largest(transport: Transport, mine: list[float]) -> list[float]:
    everyone = gather_values(transport.gather_texts, mine)
    return [max(column) for column in zip(*everyone, strict=True)]


class _Rig:
    """One candidate's exchange, ready to be timed again and again, of as much of `source` as it takes."""

    def __init__(
        self, candidate: Candidate, transport: Transport, sizes: Sequence[int], crew: Crew, source: Tensor
    ) -> None:
        self.elements = elements = sum(sizes)
        self.bytes_sent = 0.0  # in the last exchange
        self._session: Session | None = None
        self._transport = transport
        self._source = source[:elements]
        self._gradient = self._source.clone()
        self._other = torch.zeros_like(self._source)  # weights: other memory, as a step has
        if candidate.is_dense and candidate.rule is None:
            self._exchange: Exchange = self._average
            return
        bare: dict[str, Any] = {
            "dense_below": 0,
            "merge": None,
            "density_range": None,
            "diagnose_every": 0,
            "clip_norm": None,
        }
        config = replace(candidate.config, density=candidate.density, **bare)
        of_weights = candidate.rule is not None and candidate.rule.apply == "ahead"
        self._members = [Member(f"{NAME} {place}", size) for place, size in enumerate(sizes)]
        plan = plan_group(config, self._members, transport.workers)
        self._session = Session(transport, config, [plan], of_weights=of_weights, crew=crew)
        self._exchange = self._land if of_weights else self._reduce

    def time(self) -> float:
        """Seconds of one exchange. What comes before it has left other things in the caches, as training does."""
        self._gradient.copy_(self._source)
        self._other.add_(self._source, alpha=1e-9)
        before, started = self._transport.traffic.bytes_sent, time.perf_counter()
        self._exchange()
        taken = time.perf_counter() - started
        self.bytes_sent = float(self._transport.traffic.bytes_sent - before)
        return taken

    def _average(self) -> None:
        """As DDP does it: a bucket at a time."""
        for piece in self._gradient.split(BUCKET_BYTES // FLOAT_BYTES):
            self._transport.perform(AllReduce(piece, name=NAME))
            piece /= self._transport.workers

    def _reduce(self) -> None:
        assert self._session is not None
        for member, part in zip(self._members, self._parts(self._gradient), strict=True):
            self._session.submit(member.name, part)
        self._session.close().result()

    def _land(self) -> None:
        assert self._session is not None
        own, shared = self._parts(self._gradient), self._parts(self._other)
        for member, mine, common in zip(self._members, own, shared, strict=True):
            self._session.submit(member.name, mine, shared=common)
        self._session.close().result()
        take_landings(self._session.sync)

    def _parts(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, [member.elements for member in self._members])

    def end(self) -> None:
        if self._session is not None:
            self._session.end(keep_transport=True)
