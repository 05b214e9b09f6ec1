"""What `spardl simulate` is asked: one scenario per point of its sweeps."""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spardl.cli.options import sync_config
from spardl.cli.topology import factor, network_of
from spardl.cli.units import bytes_per_second, seconds
from spardl.cli.updates import chosen_update
from spardl.errors import ConfigError
from spardl.update import LocalUpdates, fitted_steps

if TYPE_CHECKING:
    from spardl.simulator.gradients import Gradients
    from spardl.simulator.simulation import Progress, SimulationReport

NOT_SWEPT = ("sweep", "json", "picture", "help")
MOST_POINTS = 1000
WATCHED = 8  # ranks of a timeline


@dataclass(frozen=True)
class Point:
    """One scenario, and what makes it differ from the others."""

    options: argparse.Namespace
    varied: Mapping[str, str]

    def varied_record(self) -> dict[str, Any]:
        """What was swept, for a record; empty if nothing was."""
        return {"sweep": dict(self.varied)} if self.varied else {}

    def simulate(self, progress: "Progress | None" = None) -> "SimulationReport":
        """Run it.

        Raises:
            ConfigError, DataError: options that cannot work.
        """
        from spardl.simulator.computing import Machine
        from spardl.simulator.simulation import simulate
        from spardl.simulator.training import Training

        options = self.options
        network = network_of(options)  # a file may say how many workers there are
        rule, config = chosen_update(options, options.update, sync_config(options, others=bool(self.varied)))
        if rule is not None and rule.adaptive:
            raise ConfigError("an adaptive density follows measured times, of which here are none; give a density.")
        slower = _slow_workers(options)
        training = Training(
            forward=seconds(options.forward),
            backward=seconds(options.backward),
            optimizer=seconds(options.optimizer),
            pieces=options.pieces,
            update=rule,
            local_steps=_fitted(slower, options.workers, rule),
        )
        return simulate(
            workers=options.workers,
            elements=options.elements,
            config=config,
            latency=seconds(options.latency),
            bandwidth=bytes_per_second(options.bandwidth),
            network=network,
            machine=Machine(slower=slower, cores=options.cores),
            training=training,
            gradients=_gradients(options),
            steps=options.steps,
            watched=_watched(options.workers, slower) if options.picture is not None else (),
            progress=progress,
        )


def points(options: argparse.Namespace) -> list[Point]:
    """Every combination of what is swept; one point if nothing is."""
    if not options.sweep:
        return [Point(options, {})]
    from spardl.cli.commands import parse

    sweeps = [_sweep(text) for text in options.sweep]
    total = math.prod(len(values) for _, values in sweeps)
    if total > MOST_POINTS:
        raise ConfigError(f"{total:,} points are more than a sweep runs; give {MOST_POINTS:,} or fewer.")
    names = [name for name, _ in sweeps]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"--sweep names {repeated[0]} twice; give all its values at once.")
    found = []
    for values in itertools.product(*(values for _, values in sweeps)):
        varied = dict(zip(names, values, strict=True))
        words = [word for name, value in varied.items() for word in (f"--{name}", value)]
        point = parse([*options.arguments, *words])
        found.append(Point(point, varied))
    return found


def _sweep(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("_", "-")
    each = [value.strip() for value in values.split(",") if value.strip()]
    if not (equals and name and each):
        raise ConfigError(f"--sweep {text!r} is not NAME=VALUE,VALUE, such as workers=2,4,8.")
    if name in NOT_SWEPT:
        raise ConfigError(f"--{name} cannot be swept; sweep what is simulated, such as workers or density.")
    return name, each


def _slow_workers(options: argparse.Namespace) -> dict[int, float]:
    found = {}
    for text in options.slow_worker:
        rank, colon, slow = text.partition(":")
        try:
            if not (colon and rank.isdecimal()):
                raise ValueError
            found[int(rank)] = factor(slow)
        except ValueError:
            raise ConfigError(f"--slow-worker {text!r} is not RANK:FACTOR, such as 3:4x.") from None
        if int(rank) >= options.workers:
            raise ConfigError(f"there is no worker {rank} to be slow; ranks are 0 to {options.workers - 1}.")
    return found


def _fitted(slower: Mapping[int, float], workers: int, rule: LocalUpdates | None) -> dict[int, int]:
    """Local steps by rank, where they are fitted to how slow ranks are."""
    if rule is None or rule.pace != "fitted":
        return {}
    return dict(enumerate(fitted_steps(rule.every, [slower.get(rank, 1.0) for rank in range(workers)])))


def _gradients(options: argparse.Namespace) -> "Gradients":
    from spardl.simulator import gradients

    if options.gradients is None:
        return gradients.HeavyTailed(options.seed, options.overlap)
    if "overlap" in options.given:
        raise ConfigError("recorded gradients overlap as they do; leave --overlap out.")
    return gradients.load(options.gradients)


def _watched(workers: int, slower: Mapping[int, float]) -> Sequence[int]:
    """The first ranks, and those that are slow."""
    ranks: dict[int, Any] = dict.fromkeys([*sorted(slower)[: WATCHED // 2], *range(workers)])
    return sorted(list(ranks)[:WATCHED])
