"""`spardl plan`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spardl.cli.choosing import choose
from spardl.cli.options import add_json_option, add_model_options, add_sync_options, add_worker_options, sync_config
from spardl.cli.output import as_seconds, records, table
from spardl.cli.parser import number_of
from spardl.cli.plot import check_plot
from spardl.cli.ranks import run_on_ranks
from spardl.cli.units import bytes_per_second, seconds
from spardl.cli.updates import add_update_options
from spardl.config import MERGES, SyncConfig
from spardl.errors import ConfigError
from spardl.launch.place import Place
from spardl.train.data import check_packages
from spardl.train.recipes import choose_recipe

if TYPE_CHECKING:
    from spardl.planning.cost import CostModel
    from spardl.planning.merge import Plan
    from spardl.planning.merging import Merging
    from spardl.planning.profile import Profile

SUMMARY = (
    "measure this network and a model or script, and say which settings win, dense included; or plan merged layers"
)

PLANNERS = [name for name in MERGES if name != "size:N"]
SHAPE_WORKERS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_argument_group(
        "measured", "Train a few steps on real ranks, time lines and exchanges, and rank what could be done."
    )
    measured.add_argument("--recipe", metavar="NAME", help="what to train: `spardl recipes` lists them")
    measured.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="FILE",
        help="a training script of your own, and whatever it takes; comes last. It is run for a few steps",
    )
    measured.add_argument("--out", type=Path, metavar="FILE", help="write the winner to a plan, as TOML, or .json")
    measured.add_argument("--data-dir", type=Path, metavar="DIR", help="where the data set's files lie")
    measured.add_argument("--batch-size", type=number_of("examples"), metavar="N", help="examples per worker")
    given = parser.add_argument_group("given", "Without either: the shape of a model, on a network as described.")
    given.add_argument("--shape", default="resnet50", metavar="NAME", help="resnet50 or vgg16 (default: %(default)s)")
    given.add_argument("--backward", metavar="TIME", help="of the whole model, such as 120ms (default: its own)")
    given.add_argument("--latency", default="1ms", metavar="TIME", help="of a message (default: %(default)s)")
    given.add_argument("--bandwidth", default="1gbit", metavar="RATE", help="of a link (default: %(default)s)")
    given.add_argument(
        "--selection-rate",
        type=float,
        default=1e9,
        metavar="N",
        help="elements that a worker selects from in a second (default: %(default)g)",
    )
    given.add_argument(
        "--published", action="store_true", help="OMGS-SGD's own costs (2, 4, 8 or 16 workers) instead of a network"
    )
    shown = parser.add_argument_group("what it shows")
    shown.add_argument("--picture", metavar="FILE", help="draw the timeline of --merge against one group")
    add_json_option(shown, "one record per candidate, or per planner")
    add_worker_options(parser)
    add_sync_options(parser)
    add_model_options(parser)
    add_update_options(parser)
    parser.set_defaults(merge="exact")


def run(options: argparse.Namespace) -> int:
    config = sync_config(options)
    if options.script is not None or (options.recipe is not None and not options.given & {"merge", "picture"}):
        return choose(options, config)
    if options.out is not None:
        raise ConfigError("--out writes what was chosen; give --recipe or --script, without --merge and --picture.")
    if config.merge is None:
        raise ConfigError(f"without --merge there is nothing to plan; choose from {', '.join(MERGES)}.")
    check_plot(options.picture)
    if options.recipe is not None:
        return _measure(options, config)
    workers = options.workers or SHAPE_WORKERS
    network = "OMGS-SGD's cluster" if options.published else f"{options.latency}, {options.bandwidth}"
    _present(options, config.merge, _profile(options), _cost(options, config, workers), f"{workers} workers, {network}")
    return 0


def _measure(options: argparse.Namespace, config: SyncConfig) -> int:
    batch = {} if options.batch_size is None else {"batch_size": options.batch_size}
    recipe = choose_recipe(options.recipe, given=batch)
    check_packages(recipe.data)

    def work(place: Place) -> None:
        from spardl.train.loop import train_until_planned

        merging = train_until_planned(recipe, config, data_dir=options.data_dir)
        if place.rank == 0:
            network = f"{place.workers} workers, as measured"
            _present(options, str(config.merge), merging.profile, merging.costs.model(), network, merging)

    return run_on_ranks(options, [config], work)


def _present(
    options: argparse.Namespace,
    merge: str,
    profile: "Profile",
    cost: "CostModel",
    network: str,
    merging: "Merging | None" = None,
) -> None:
    from spardl.planning import timeline
    from spardl.planning.merge import plan

    plans = {name: plan(name, profile, cost) for name in dict.fromkeys([*PLANNERS, merge])}
    chosen, single = plans[merge], plans["single"]
    with records(options.json) as write:
        for each in plans.values():
            write(each.to_dict())
    if options.picture:
        timeline.draw(single.timeline, chosen.timeline, options.picture)
    if options.json == "-":
        return
    model = options.recipe or options.shape
    _show(f"{model}: {profile.elements:,} parameters in {len(profile.layers)} tensors, {network}", plans, single)
    rows = [[f"{each:.2f}" if isinstance(each, float) else f"{each}" for each in row] for row in _rows(chosen)]
    columns: tuple[str, ...] = timeline.COLUMNS
    if merging is not None and merging.densities is not None:
        columns = (*columns, "density")
        rows = [[*row, f"{density:.3g}"] for row, density in zip(rows, merging.densities, strict=True)]
    table(f"Groups of {merge}", columns, [tuple(row) for row in rows])


def _profile(options: argparse.Namespace) -> "Profile":
    from spardl.planning.profile import Layer, Profile
    from spardl.planning.shapes import shape

    profile = shape(options.shape)
    if options.backward is None:
        return profile
    stretch = seconds(options.backward) / profile.backward
    layers = (Layer(each.name, each.elements, each.seconds * stretch) for each in profile.layers)
    return Profile(tuple(layers), profile.forward * stretch)


def _cost(options: argparse.Namespace, config: SyncConfig, workers: int) -> "CostModel":
    from spardl.planning.cost import from_network, published

    if options.published:
        return published(workers, density=config.density_at(0))
    return from_network(
        config,
        workers,
        latency=seconds(options.latency),
        bandwidth=bytes_per_second(options.bandwidth),
        selection_rate=options.selection_rate,
    )


def _show(title: str, plans: "dict[str, Plan]", single: "Plan") -> None:
    table(
        title,
        ("planner", "groups", "step", "exposed", "against one group"),
        [
            (
                name,
                f"{len(each.groups)}",
                as_seconds(each.timeline.iteration),
                as_seconds(each.timeline.exposed),
                f"{single.timeline.iteration / each.timeline.iteration:.2f}x",
            )
            for name, each in plans.items()
        ],
        note="exposed: synchronisation that backward does not hide",
    )


def _rows(chosen: "Plan") -> Sequence[Sequence[object]]:
    from spardl.planning import timeline

    return timeline.table(chosen.timeline)
