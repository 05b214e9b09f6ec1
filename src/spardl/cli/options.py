"""Options that several commands share. Synchronisation options bear the names of `SyncConfig`'s fields."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, get_args

from spardl.cli.parser import number_of
from spardl.config import (
    METHODS,
    Blocks,
    DensitySchedule,
    Gather,
    Indices,
    Rebalance,
    Residuals,
    Selection,
    SyncConfig,
    Threshold,
    Transport,
    Values,
    check_choice,
)
from spardl.errors import ConfigError

DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SyncConfig)}


def add_sync_options(parser: argparse.ArgumentParser, *, several_methods: bool = False) -> None:
    """How gradients are synchronised: the same names, meanings and defaults in every command."""
    group = parser.add_argument_group("synchronisation")
    add = _Adder(group)
    if several_methods:
        group.add_argument(
            "--methods",
            "--method",
            metavar="NAMES",
            default="dense,spardl",
            help="names that `spardl methods` lists, separated by commas, or all (default: %(default)s)",
        )
    else:
        add("method", "NAME", "a name that `spardl methods` lists")
    add("density", "SHARE", "share of the entries that a step sends, in (0, 1]", type=number)
    group.add_argument(
        "--density-warmup",
        metavar="START:STEPS",
        help="begin at density START and come down to --density over STEPS steps, such as 0.25:50; none for none"
        " (default: 0.25 over the first epochs of a training below 0.5 %%, else none)",
    )
    add("teams", "N|auto", "number of teams, a divisor of the workers", type=_count_or("auto"))
    add("gather", Gather, "how teams agree: recursive doubling or Bruck")
    add("blocks", Blocks, "whether a block samples all layers or is a run of elements")
    add("residuals", Residuals, "what happens to entries that were dropped on the way")
    add("values", Values, "format of values on the wire")
    add("indices", Indices, "format of indices on the wire")
    add("selection", Selection, "when a block is cut: once, or at every addition")
    add("rebalance", Rebalance, "how ExDyna moves its partitions")
    add("threshold", Threshold, "how ExDyna and MiCRO follow their target")
    add("transport", Transport, "who moves the bytes: our own connections, torch or MPI")
    add("timeout", "SECONDS", "how long any wait for a peer may take", type=number)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What only a model's gradient knows: how its parameters are grouped and clipped."""
    add = _Adder(parser.add_argument_group("gradients of a model"))
    what = "what is synchronised together: all, each DDP bucket, or at most N elements"
    add("groups", "model|bucket|N", what, type=_count_or("model", "bucket"))
    add("merge", "PLANNER", "let a planner choose the groups: exact, omgs, mgwfbp, size:N, layer or single")
    add("density_range", "LEAST:MOST", "with --merge: densities by group, what backward can hide (LAGS)", type=_range)
    add("delta_every", "N", "steps between diagnoses of the selection; 0 is never", type=number_of("steps", at_least=0))
    add("dense_below", "N", "groups with fewer elements than N go dense", type=number_of("elements", at_least=0))
    add("local_clip", "NORM", "clip each worker's gradient to NORM / sqrt(workers), before it is added", type=number)


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument(
        "--workers",
        type=number_of("workers"),
        metavar="N",
        help="start N processes on this machine (default: 4); under torchrun and the like, their number is known",
    )
    group.add_argument("--port", type=_port, metavar="PORT", help="where local workers meet (default: any free port)")


def add_seed_option(parser: argparse._ActionsContainer, what: str, default: int | None = None) -> None:
    shown = "" if default is None else f" (default: {default})"
    parser.add_argument("--seed", type=_seed, default=default, metavar="N", help=what + shown)


def add_json_option(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument("--json", metavar="FILE", help=f"write {what} as JSON to FILE; - is standard output")


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def sync_config(options: argparse.Namespace, method: str | None = None) -> SyncConfig:
    """The configuration that the options describe; raises `ConfigError` where they cannot work."""
    settings = {name: getattr(options, name) for name in DEFAULTS if hasattr(options, name)}
    if method is not None:
        settings["method"] = method
    if options.density_warmup is not None:
        settings["density"] = _warmup(options.density_warmup, settings["density"])
    return SyncConfig(**settings)


def sync_configs(options: argparse.Namespace) -> list[SyncConfig]:
    """One configuration per name in `--methods`, in that order."""
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    if names == ["all"]:
        names = list(METHODS)
    if not names:
        raise ConfigError("--methods names no method; `spardl methods` lists them.")
    for name in names:
        check_choice("method", name, tuple(METHODS), hint="`spardl methods` lists them")
    return [sync_config(options, name) for name in dict.fromkeys(names)]


class _Adder:
    """Adds options of `SyncConfig` fields, with their defaults. Choices are shown here and checked by SyncConfig."""

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group

    def __call__(self, field: str, shape: Any, what: str, **settings: Any) -> None:
        default = DEFAULTS[field]
        value = f"{default:g}" if isinstance(default, float) else default
        self._group.add_argument(
            "--" + field.replace("_", "-"),
            default=default,
            metavar=shape if isinstance(shape, str) else "|".join(get_args(shape)),
            help=what if default is None else f"{what} (default: {value})",
            **settings,
        )


def _port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, give 1 to 65535 or leave it out")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, give a whole number from 0 on")
    return int(text)


def _count_or(*words: str) -> Callable[[str], int | str]:
    """An option type: a whole number, or one of these words."""

    def parse(text: str) -> int | str:
        if text in words:
            return text
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor {' or '.join(words)}") from None

    return parse


def _range(text: str) -> tuple[float, float]:
    least, colon, most = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range, write it like 0.001:0.1")
    return number(least), number(most)


def _warmup(text: str, target: float) -> DensitySchedule:
    if text == "none":
        return DensitySchedule(target=target, start=target)
    start, _, steps = text.partition(":")
    try:
        density, count = float(start), int(steps)
    except ValueError:
        raise ConfigError(f"--density-warmup {text} is not START:STEPS, such as 0.25:50, or none.") from None
    return DensitySchedule(target=target, start=density, steps=count)
