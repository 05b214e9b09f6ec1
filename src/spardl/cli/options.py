"""Options that several commands share. Synchronisation options bear the names of `SyncConfig`'s fields."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spardl.choices import check_choice, declared
from spardl.cli.parser import number_of
from spardl.collectives.methods.registry import method_names
from spardl.config import OF_A_MODEL, SyncConfig, options_of
from spardl.density import DensitySchedule
from spardl.errors import ConfigError

AUTO = "auto"  # as `attach` takes it: measure, and choose
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SyncConfig)}

MODEL_OPTIONS = (*OF_A_MODEL, "dense_below")


def add_sync_options(parser: argparse.ArgumentParser, *, several_methods: bool = False) -> None:
    """How gradients are synchronised: the same names, meanings and defaults in every command."""
    group = parser.add_argument_group("synchronisation")
    for field in declared(SyncConfig):
        if field.name == "method" and several_methods:
            group.add_argument(
                "--methods",
                "--method",
                metavar="NAMES",
                default="dense,spardl",
                help="names that `spardl methods` lists, separated by commas, or all (default: %(default)s)",
            )
        elif field.name not in MODEL_OPTIONS:
            add_setting(group, field)
        if field.name == "density":
            group.add_argument(
                "--density-warmup",
                metavar="START:STEPS",
                help="begin at density START and come down to --density over STEPS steps, such as 0.25:50; none for"
                " none (default: 0.25 over the first epochs of a training below 0.5 %%, else none)",
            )
    _add_method_options(parser.add_argument_group("options of single methods"))


def _add_method_options(group: argparse._ArgumentGroup) -> None:
    owners: dict[str, list[str]] = {}
    for method in method_names():
        for name in options_of(method):
            owners.setdefault(name, []).append(method)
    for name, methods in owners.items():
        add_setting(group, options_of(methods[0])[name], of=", ".join(methods))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What only a model's gradient knows: how its parameters are grouped and clipped."""
    group = parser.add_argument_group("gradients of a model")
    for field in declared(SyncConfig):
        if field.name in MODEL_OPTIONS:
            add_setting(group, field)


def add_setting(group: argparse._ArgumentGroup, field: "dataclasses.Field[Any]", of: str = "") -> None:
    """An option for a setting; choices are shown here and checked later.

    One that only some have, `of` whom it says, is None where it is not given.
    """
    default, meta = field.default, field.metadata
    text = meta["text"].replace("`", "").replace("%", "%%")
    text += "" if default is None and not of else f" (default: {shown(default)})"
    common: dict[str, Any] = {"default": None if of else default, "help": f"{of}: {text}" if of else text}
    flag = "--" + field.name.replace("_", "-")
    if isinstance(default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    choices = "|".join(choice for choice in meta["choices"] if len(choice) > 1)
    group.add_argument(flag, type=type_of(field), metavar=choices or meta["metavar"] or field.name.upper(), **common)


def shown(value: Any) -> str:
    """A setting's value as people write it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ":".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def type_of(field: "dataclasses.Field[Any]") -> Callable[[str], Any]:
    """What reads a setting's value from the command line."""
    if field.name in ("density_range", "density_limits"):
        return _range
    if field.metadata["parse"] in (int, float) or isinstance(field.default, float):
        return number
    if isinstance(field.default, int):
        return number_of({"dense_below": "elements"}.get(field.name, "steps"), at_least=0)
    parse: Callable[[str], Any] | None = field.metadata["parse"]
    return str if parse is None or parse is str else _parsed(field.name, parse)


def _parsed(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An option type whose refusals are sentences."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            if name == "order":
                raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks, write it like 0,2,1,3") from None
            kind = "a number" if name == "outer_rate" else "a whole number"
            raise argparse.ArgumentTypeError(f"{text!r} is neither {kind} nor auto") from None

    return parsed


def add_worker_options(parser: argparse.ArgumentParser, default: int = 4) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument(
        "--workers",
        type=number_of("workers"),
        metavar="N",
        help=f"start N processes on this machine (default: {default}); under torchrun and the like, their number is"
        " known",
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


def sync_config(options: argparse.Namespace, method: str | None = None, *, others: bool = False) -> SyncConfig:
    """The configuration that the options describe; raises `ConfigError` where they cannot work.

    With `others`, options that this method does not have are meant for other methods of the same command.
    """
    settings = {name: getattr(options, name) for name in DEFAULTS if hasattr(options, name)}
    if method is not None:
        settings["method"] = method
    if settings["method"] == AUTO:
        raise ConfigError(
            "auto chooses while a model is trained: `spardl train` and `spardl compare` take it, and `spardl plan`"
            " compares all methods without being told; name a method here."
        )
    if options.density_warmup is not None:
        settings["density"] = _warmup(options.density_warmup, settings["density"])
    own = options_of(settings["method"])
    for name in given_method_options(options):
        if name in own or not others:
            settings[name] = getattr(options, name)
    return SyncConfig(**settings)


def training_config(options: argparse.Namespace) -> tuple[SyncConfig, bool]:
    """The same for a training, and whether its method is to be measured: then the default one stands in its place."""
    chooses = options.method == AUTO
    return sync_config(options, DEFAULTS["method"] if chooses else None), chooses


def given_method_options(options: argparse.Namespace) -> list[str]:
    """The options of single methods that were given."""
    known = dict.fromkeys(name for method in method_names() for name in options_of(method))
    return [name for name in known if getattr(options, name, None) is not None]


def sync_configs(options: argparse.Namespace, names: Sequence[str] | None = None) -> list[SyncConfig]:
    """One configuration per name in `--methods`, or of these, in that order."""
    if names is None:
        names = method_list(options)
    if names == ["all"]:
        names = list(method_names())
    for name in names:
        if name == AUTO:
            sync_config(options, AUTO)
        check_choice("method", name, method_names(), hint="`spardl methods` lists them")
    for option in given_method_options(options):
        if not any(option in options_of(name) for name in names):
            raise ConfigError(f"none of {', '.join(names)} has an option {option!r}; leave it out.")
    return [sync_config(options, name, others=True) for name in dict.fromkeys(names)]


def method_list(options: argparse.Namespace) -> list[str]:
    """The names in `--methods`, each once."""
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not names:
        raise ConfigError("--methods names no method; `spardl methods` lists them.")
    return list(dict.fromkeys(names))


def _port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, give 1 to 65535 or leave it out")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, give a whole number from 0 on")
    return int(text)


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
