"""The short exchange of `spardl doctor`: do ranks reach each other, do they compute the same, and how fast is it?"""

import platform
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist

from spardl.agreement import gather_values
from spardl.cli.findings import CORE, Finding, installed
from spardl.cli.output import as_bytes, as_seconds
from spardl.config import SyncConfig
from spardl.errors import SparDLWarning
from spardl.machine import cores_each
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session
from spardl.transport.base import Transport
from spardl.version import __version__

ELEMENTS = 1_000_000
DENSITY = 0.01
LEAST = 3  # repetitions of each


def trial_findings(seconds: float, timeout: float) -> Iterator[Finding]:
    """Connect all ranks, compare them, exchange for about so many seconds. Collective; the same findings on each."""
    session, refused = _connect(timeout)
    try:
        yield _connections(session, refused)
        yield from _crews(session.transport)
        yield from _same_software(session.transport)
        if session.transport.workers > 1:
            yield _right(session)
            yield _times(session, seconds)
    finally:
        session.end()


def _connect(timeout: float) -> tuple[Session, str]:
    """A session between all ranks, and why they do not connect directly, if they do not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = SyncConfig(density=DENSITY, timeout=timeout)
        session = Session.open([], config, commit="group", subject="this check")
    said = [str(each.message) for each in caught if issubclass(each.category, SparDLWarning)]
    return session, " ".join(said)


def _connections(session: Session, refused: str) -> Finding:
    workers = session.transport.workers
    if refused:
        return Finding("connections", "note", refused, "until then everything works, and small messages take longer.")
    if workers == 1:
        advice = "start more ranks to see whether they reach each other."
        return Finding("connections", "note", "there is one rank, which has nobody to talk to.", advice)
    return Finding("connections", "good", f"each of the {workers} ranks reaches every other directly.")


def _crews(transport: Transport) -> Iterator[Finding]:
    """How many cores each rank has to itself."""
    shares = cores_each(transport.gather_texts)
    least = min(shares)
    if least < 1:
        text = f"ranks outnumber cores: rank {shares.index(least)} has {least:.2g} of one, and takes turns."
        yield Finding("ranks", "note", text, "start no more ranks on a machine than it has cores.")
    else:
        yield Finding("ranks", "good", f"cores per rank: {least:.3g} or more.")


def _same_software(transport: Transport) -> Iterator[Finding]:
    """Ranks with different versions may compute different bits."""
    mine = {"spardl": __version__, "python": platform.python_version(), **installed(CORE)}
    known = gather_values(transport.gather_texts, {"host": socket.gethostname(), **mine})
    hosts = sorted({each.pop("host") for each in known})
    for rank, other in enumerate(known):
        for name in sorted(set(known[0]) | set(other)):
            first, theirs = known[0].get(name, "none"), other.get(name, "none")
            if first != theirs:
                text = f"rank 0 has {name} {first}, rank {rank} has {theirs}; results may differ in their last bits."
                yield Finding("ranks", "bad", text, "install the same versions everywhere.")
                return
    yield Finding("ranks", "good", f"{len(known)} ranks on {', '.join(hosts)} have the same software.")


def _right(session: Session) -> Finding:
    """A mean that everybody can do in the head, sent whole: rank r brings r + 1 everywhere."""
    rank, workers = session.transport.rank, session.transport.workers
    tensor = torch.full((ELEMENTS // 100,), float(rank + 1))
    config = SyncConfig(density=1.0, values="fp32", timeout=session.config.timeout)
    reduce = _reducer(session, "check", config, tensor.numel())
    reduce(tensor)
    expected = torch.full_like(tensor, (workers + 1) / 2)
    digest = int(numpy.asarray(tensor).view(numpy.uint32).sum(dtype=numpy.uint64))
    outcomes = gather_values(session.transport.gather_texts, [torch.allclose(tensor, expected), digest])
    if all(right for right, _ in outcomes) and len({each for _, each in outcomes}) == 1:
        return Finding("exchange", "good", "the mean that ranks agreed on is right, and the same bits everywhere.")
    wrong = [rank for rank, (right, _) in enumerate(outcomes) if not right] or "some"
    advice = "this is a bug or broken hardware: please report it with the output of this command."
    return Finding("exchange", "bad", f"ranks {wrong} got a wrong mean of {tensor.numel()} numbers.", advice)


def _times(session: Session, seconds: float) -> Finding:
    """Half of the time dense by torch, half sparse by ours; the slowest rank's median."""
    source = torch.Generator().manual_seed(session.transport.rank)
    gradient = torch.randn(ELEMENTS, generator=source)
    reduce = _reducer(session, "gradient", session.config, ELEMENTS)
    before = session.transport.traffic.bytes_sent
    sparse, count = _timed(session.transport, lambda: reduce(gradient.clone()), seconds / 2)
    sent = (session.transport.traffic.bytes_sent - before) / (count + 1)
    dense, _ = _timed(session.transport, lambda: dist.all_reduce(gradient.clone()), seconds / 2)
    text = (
        f"one gradient of {ELEMENTS:,} entries takes {as_seconds(sparse)} at {100 * DENSITY:g} %"
        f" ({as_bytes(sent)} sent per rank), {as_seconds(dense)} when torch sends all of it."
    )
    if sparse > dense:
        advice = (
            "on a line as fast as this one, dense is the better choice for models of this size; spardl bench tells."
        )
        return Finding("exchange", "note", text, advice)
    return Finding("exchange", "good", text)


def _reducer(session: Session, name: str, config: SyncConfig, elements: int) -> Callable[[torch.Tensor], None]:
    session.include(plan_group(config, [Member(name, elements)], session.transport.workers))

    def reduce(tensor: torch.Tensor) -> None:
        session.reduce(name, tensor)

    return reduce


def _timed(transport: Transport, work: Callable[[], Any], seconds: float) -> tuple[float, int]:
    """The slowest rank's median time, and how often it was done: as often as fits, the same number on all ranks."""
    first = max(gather_values(transport.gather_texts, _seconds_of(work)))
    repetitions = max(LEAST, min(200, int(seconds / max(first, 1e-4))))
    times = [_seconds_of(work) for _ in range(repetitions)]
    return max(gather_values(transport.gather_texts, _median(times))), repetitions


def _seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]
