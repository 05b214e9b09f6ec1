"""`spardl plan`."""

import argparse
from typing import TYPE_CHECKING

from spardl.cli.options import add_json_option, add_model_options, add_sync_options, sync_config
from spardl.cli.output import as_seconds, records, table
from spardl.cli.parser import number_of
from spardl.cli.units import bytes_per_second, seconds
from spardl.config import MERGES, SyncConfig
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from spardl.planning.cost import CostModel
    from spardl.planning.merge import Plan
    from spardl.planning.profile import Profile

SUMMARY = "plan which layers to synchronise together on a given network, and draw the timeline of a step"

PLANNERS = [name for name in MERGES if name != "size:N"]


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and network")
    group.add_argument("--shape", default="resnet50", metavar="NAME", help="resnet50 or vgg16 (default: %(default)s)")
    group.add_argument("--workers", type=number_of("workers"), default=16, metavar="N", help="default: %(default)s")
    group.add_argument("--backward", metavar="TIME", help="of the whole model, such as 120ms (default: the shape's own)")
    group.add_argument("--latency", default="1ms", metavar="TIME", help="of a message (default: %(default)s)")
    group.add_argument("--bandwidth", default="1gbit", metavar="RATE", help="of a link (default: %(default)s)")
    group.add_argument(
        "--selection-rate",
        type=float,
        default=1e9,
        metavar="N",
        help="elements that a worker selects from in a second (default: %(default)g)",
    )
    group.add_argument(
        "--published", action="store_true", help="OMGS-SGD's own costs (2, 4, 8 or 16 workers) instead of this network"
    )
    group.add_argument("--picture", metavar="FILE", help="draw the timeline of --merge against one group")
    add_json_option(group, "one record per planner")
    add_sync_options(parser)
    add_model_options(parser)
    parser.set_defaults(merge="exact")


def run(options: argparse.Namespace) -> int:
    config = sync_config(options)
    if config.merge is None:
        raise ConfigError(f"without --merge there is nothing to plan; choose from {', '.join(MERGES)}.")
    profile, cost = _profile(options), _cost(options, config)
    from spardl.planning import timeline
    from spardl.planning.merge import plan

    plans = [plan(name, profile, cost) for name in dict.fromkeys([*PLANNERS, config.merge])]
    chosen = next(each for each in plans if each.planner == config.merge)
    single = next(each for each in plans if each.planner == "single")
    with records(options.json) as write:
        for each in plans:
            write(each.to_dict())
    if options.picture:
        timeline.draw(single.timeline, chosen.timeline, options.picture)
    if options.json != "-":
        _show(options, profile, plans, single)
        rows = [tuple(f"{v:.2f}" if isinstance(v, float) else f"{v}" for v in row) for row in _rows(chosen)]
        table(f"Groups of {chosen.planner}", timeline.COLUMNS, rows)
    return 0


def _profile(options: argparse.Namespace) -> "Profile":
    from spardl.planning.profile import Layer, Profile
    from spardl.planning.shapes import shape

    profile = shape(options.shape)
    if options.backward is None:
        return profile
    stretch = seconds(options.backward) / profile.backward
    layers = (Layer(each.name, each.elements, each.seconds * stretch) for each in profile.layers)
    return Profile(tuple(layers), profile.forward * stretch)


def _cost(options: argparse.Namespace, config: SyncConfig) -> "CostModel":
    from spardl.planning.cost import from_network, published

    if options.published:
        return published(options.workers, density=config.density_at(0))
    return from_network(
        config,
        options.workers,
        latency=seconds(options.latency),
        bandwidth=bytes_per_second(options.bandwidth),
        selection_rate=options.selection_rate,
    )


def _show(options: argparse.Namespace, profile: "Profile", plans: "list[Plan]", single: "Plan") -> None:
    network = "OMGS-SGD's cluster" if options.published else f"{options.latency}, {options.bandwidth}"
    table(
        f"{options.shape}: {profile.elements:,} parameters in {len(profile.layers)} tensors, {options.workers} workers,"
        f" {network}",
        ("planner", "groups", "step", "exposed", "against one group"),
        [
            (
                each.planner,
                f"{len(each.groups)}",
                as_seconds(each.timeline.iteration),
                as_seconds(each.timeline.exposed),
                f"{single.timeline.iteration / each.timeline.iteration:.2f}x",
            )
            for each in plans
        ],
        note="exposed: synchronisation that backward does not hide",
    )


def _rows(chosen: "Plan") -> list[tuple[object, ...]]:
    from spardl.planning import timeline

    return [tuple(row) for row in timeline.table(chosen.timeline)]
