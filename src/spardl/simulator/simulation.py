"""Any method on any number of simulated workers, on any network: what it costs, and whether anything was lost."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spardl import kernels
from spardl.config import SyncConfig, configure_vector
from spardl.errors import ConfigError
from spardl.simulator.balance import Balance
from spardl.simulator.computing import Machine
from spardl.simulator.driver import Driver, Span
from spardl.simulator.gradients import Ahead, Gradients, HeavyTailed
from spardl.simulator.network import Link, Network
from spardl.simulator.training import Cluster, Training
from spardl.sync.plan import Member, plan_group
from spardl.sync.synchronizer import Synchronizer

MOST_WORKERS = 4096
LINKS_SHOWN = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LinkReport:
    """What a link has carried per exchange, and for how long that keeps it busy."""

    name: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class SimulationReport:
    """One simulated run. Figures are per exchange, of the rank that has most; `conserved` covers all ranks' residuals.

    time_s     from one exchange to the next, computing included
    compute_s  what the slowest worker computes for itself in that time, synchronisation not counted
    exposed_s  the rest: what training waits for
    links      the busiest ones, the busiest first
    """

    method: str
    workers: int
    teams: int
    elements: int
    density: float
    steps: int
    latency_s: float
    bandwidth_bytes_per_s: float
    time_s: float
    rounds: int
    messages_max: int
    bytes_sent_max: int
    bits_per_entry: float
    nnz: int
    conserved: bool
    lost_share: float
    topology: str = "switch"
    update: str = "gradients"
    every: int = 1
    compute_s: float = 0.0
    exposed_s: float = 0.0
    links: tuple[LinkReport, ...] = ()
    spans: tuple[Span, ...] = dataclasses.field(default=(), repr=False)

    @property
    def busiest(self) -> LinkReport | None:
        """The link that is busy for longest."""
        return self.links[0] if self.links else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; without the spans, which are for pictures."""
        found = dataclasses.asdict(dataclasses.replace(self, spans=()))
        del found["spans"]
        return {**found, "busiest_link": self.busiest.name if self.busiest else None}


def simulate(
    *,
    workers: int,
    elements: int,
    config: SyncConfig | None = None,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    network: Network | None = None,
    machine: Machine | None = None,
    training: Training | None = None,
    gradients: Gradients | None = None,
    steps: int = 1,
    seed: int = 0,
    watched: Sequence[int] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> SimulationReport:
    """Train for some steps on a simulated network and report what it cost.

    Every rank runs the product's own step, selection and frames included, in virtual time. Memory: one vector per
    worker, and what is under way.

    Args:
        workers: how many, up to 4,096.
        elements: of the vector that they synchronise.
        config: the settings, or `settings` by name, instead of it or on top of it.
        latency: seconds that a message takes beside its bytes, on a switch.
        bandwidth: bytes per second of each line, on a switch.
        network: what connects them, instead of a switch.
        machine: what computing costs them; default: nothing.
        training: what they compute between exchanges, and whether gradients or local updates are exchanged.
        gradients: what they synchronise; default: heavy-tailed random ones.
        steps: how many exchanges to simulate.
        seed: of the default gradients.
        watched: ranks of which the report has a timeline.
        progress: called with what is done, and with what there is to do.

    Returns:
        Figures per exchange. `conserved` says whether, over all steps and at every coordinate, what all ranks put in
        equals what they got out plus what they kept, to float32 accuracy; `lost_share` is what was missing then, as a
        share of the magnitude put in.

    Raises:
        ConfigError: settings that cannot work.
    """
    config = configure_vector(config, settings)
    training = training or Training()
    machine = machine or Machine()
    _check(workers, elements, steps, config, training, network)
    driver = Driver(network or Network.switch(workers, latency=latency, bandwidth=bandwidth), machine, watched=watched)
    source = Ahead(gradients or HeavyTailed(seed))
    cluster = Cluster(
        _ranks(workers, elements, config, training.pieces),
        training,
        source,
        machine.costs,
        Balance(workers, elements),
        None if progress is None else lambda done: progress(done, 2 * workers * steps * training.pieces),
    )
    try:
        driver.run([cluster.program(rank, steps) for rank in range(workers)])
    finally:
        source.close()
    cluster.settle()
    return _report(driver, cluster, config, steps, elements, latency, bandwidth)


def _check(
    workers: int, elements: int, steps: int, config: SyncConfig, training: Training, network: Network | None
) -> None:
    if workers < 1 or elements < 1:
        raise ConfigError(f"{workers} workers with {elements} elements leave nothing to simulate; give 1 or more.")
    if workers > MOST_WORKERS:
        raise ConfigError(f"{workers} workers are more than one process simulates; give {MOST_WORKERS} or fewer.")
    if steps < 1:
        raise ConfigError(f"{steps} steps leave nothing to simulate; give 1 or more.")
    if training.pieces > elements:
        raise ConfigError(f"{elements} elements cannot come in {training.pieces} pieces; give fewer.")
    if network is not None and network.workers != workers:
        raise ConfigError(f"this network connects {network.workers} workers, not {workers}; give as many.")
    config.check_for(workers)


def _ranks(workers: int, elements: int, config: SyncConfig, pieces: int) -> list[Synchronizer]:
    """One synchronizer per worker, whose groups are equal pieces of the vector."""
    kernel = kernels.for_device(torch.device("cpu"))
    edges = [elements * place // pieces for place in range(pieces + 1)]
    plans = [
        plan_group(config, [Member(f"piece {place}", edges[place + 1] - edges[place])], workers)
        for place in range(pieces)
    ]
    ranks = [Synchronizer(rank, workers, kernels=kernel) for rank in range(workers)]
    for sync in ranks:
        sync.regroup(plans)
    return ranks


def _report(
    driver: Driver, cluster: Cluster, config: SyncConfig, steps: int, elements: int, latency: float, bandwidth: float
) -> SimulationReport:
    traffic, ranks = driver.traffic, cluster.ranks
    workers, training, balance = len(ranks), cluster.training, cluster.balance
    sent = sum(rank.bytes_sent for rank in traffic)
    entries = sum(group.memory.frames.account.entries for sync in ranks for group in sync.groups)
    time = driver.time / steps
    compute = max(driver.machine.seconds(rank, training.seconds * training.steps_of(rank)) for rank in range(workers))
    return SimulationReport(
        method=config.method,
        workers=workers,
        teams=config.teams_of(workers),
        elements=elements,
        density=config.density_at(steps - 1),
        steps=steps,
        latency_s=latency,
        bandwidth_bytes_per_s=bandwidth,
        time_s=time,
        rounds=max(rank.rounds for rank in traffic) // steps,
        messages_max=max(rank.messages for rank in traffic) // steps,
        bytes_sent_max=max(rank.bytes_sent for rank in traffic) // steps,
        bits_per_entry=8 * sent / entries if entries else 32.0 if sent else 0.0,
        nnz=sum(group.stats.last_entries for group in ranks[0].groups),
        conserved=balance.conserved,
        lost_share=0.0 if balance.conserved else balance.lost_share,
        topology=driver.network.name,
        update="gradients" if training.update is None else "local",
        every=training.every,
        compute_s=compute,
        exposed_s=max(0.0, time - compute),
        links=_links(driver.carried, steps),
        spans=tuple(driver.spans),
    )


def _links(carried: Mapping[Link, float], steps: int) -> tuple[LinkReport, ...]:
    """The links that are busy for longest; of those that are never, the ones that carry most."""
    found = [LinkReport(link.name, size / steps, size / steps / link.goodput) for link, size in carried.items()]
    found.sort(key=lambda link: (-link.seconds, -link.bytes))
    return tuple(found[:LINKS_SHOWN])
