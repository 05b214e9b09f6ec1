"""Settings: what a user chooses, checked where it is chosen. No torch here, so the command line starts fast.

Settings that every method understands are fields of `SyncConfig`; each method has options of its own beside them
(`Method.Options`). Both are given side by side, to `attach`, to `SyncConfig` and on the command line.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spardl.choices import check_choice, check_settings, is_count, is_number, setting
from spardl.collectives.methods.registry import method_class, method_names
from spardl.density import DensitySchedule, check_density
from spardl.errors import ConfigError
from spardl.memory.residuals import POLICIES
from spardl.wire.format import INDEX_FLAGS, VALUE_FORMATS

MAX_TIMEOUT = 31 * 24 * 3600.0

MERGES = ("exact", "omgs", "mgwfbp", "layer", "single", "size:N")
TRANSPORTS = ("auto", "torch", "mpi")
INDICES = ("auto", *INDEX_FLAGS)

# What only a model's gradient knows: how its parameters are grouped, clipped and diagnosed.
OF_A_MODEL = ("groups", "merge", "density_range", "diagnose_every", "clip_norm", "paranoid")


def check_merge(name: str, given: object) -> None:
    """Raise `ConfigError` unless this names a planner."""
    if given is None:
        return
    kind, colon, number = str(given).partition(":")
    if kind != "size":
        check_choice(name, given, MERGES)
    elif not (colon and number.isascii() and number.isdigit() and int(number)):
        raise ConfigError(f"merge={given!r} names no size; give a number of elements, such as size:8192.")


def _check_density(name: str, given: Any) -> None:
    if not isinstance(given, DensitySchedule):
        check_density(given)


def _check_groups(name: str, given: Any) -> None:
    if isinstance(given, str):
        check_choice("groups", given, ("model", "bucket"), hint="or give the largest number of elements")
    elif not is_count(given, least=1):
        raise ConfigError(f'groups of at most {given!r} elements hold nothing; give 1 or more, or groups="model".')


def _check_range(name: str, given: Any) -> None:
    if given is None:
        return
    floor, ceiling = given
    check_density(floor)
    check_density(ceiling)
    if floor > ceiling:
        raise ConfigError(f"density_range begins with {floor}, above its end {ceiling}; swap them.")


def _check_every(name: str, given: Any) -> None:
    if not is_count(given):
        raise ConfigError(f"{name}={given!r} is not a number of steps; give 1 or more, or 0 for never.")


def _check_elements(name: str, given: Any) -> None:
    if not is_count(given):
        raise ConfigError(f"{name}={given!r} is not a number of elements; give 0 or more.")


def _check_norm(name: str, given: Any) -> None:
    if given is not None and not (is_number(given) and given > 0):
        raise ConfigError(f"{name}={given!r} leaves no gradient; give a positive norm or None.")


def _check_key(name: str, given: Any) -> None:
    if given is not None and not (isinstance(given, str) and given):
        raise ConfigError(f"{name}={given!r} is no name of a file; give one with a key and a certificate, or None.")


def _check_timeout(name: str, given: Any) -> None:
    if not (is_number(given) and 0 < given <= MAX_TIMEOUT):
        raise ConfigError(f"timeout={given!r} is no time to wait; give a number of seconds above 0, at most a month.")


def _groups(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


@dataclass(frozen=True, init=False, kw_only=True)
class SyncConfig:
    """How gradients are synchronised. The same names are keywords of `attach` and options of every command.

    Args:
        settings: the fields below, and the options of the chosen method, such as `teams` of spardl; `spardl methods`
            lists them.

    Raises:
        ConfigError: a setting that cannot work, or one that the chosen method does not have.
    """

    method: str = setting(
        "spardl",
        "how gradients are exchanged: a name that `spardl methods` lists; where a model is trained also auto, which"
        " measures and chooses",
        metavar="NAME",
    )
    density: float | DensitySchedule = setting(
        0.01,
        "share of entries that a step may send: a number in (0, 1] or a `DensitySchedule`",
        check=_check_density,
        metavar="SHARE",
    )
    values: str = setting(
        "bf16",
        "format of values on the wire; the rounding error stays with the sender",
        choices=[name for name, each in VALUE_FORMATS.items() if each.carries_values],
    )
    indices: str = setting(
        "auto",
        "rice is close to entropy, fixed fits devices and never takes more than rice at its worst, raw sends int32, for"
        " comparison; auto is rice on a CPU and fixed elsewhere",
        choices=INDICES,
    )
    residuals: str = setting(
        "carry",
        "what did not survive stays where it was dropped (carry) or goes back to its owner (return, the paper's way);"
        " partial and local lose some, for ablation",
        choices=tuple(POLICIES),
    )
    residuals_on: str = setting(
        "device",
        "where residuals live: with the gradients, or in the memory of the host (cpu), which then selects and exchanges"
        " as well, for models that fill their device",
        choices=("device", "cpu"),
    )
    groups: int | Literal["model", "bucket"] = setting(
        "model",
        "one exchange for the whole model, one per DDP bucket, or the largest number of elements in a group",
        check=_check_groups,
        parse=_groups,
        metavar="GROUPS",
    )
    merge: str | None = setting(
        None,
        "let a planner choose the groups after a few steps, and overlap them with backward: exact, omgs, mgwfbp,"
        " size:N, layer, single",
        check=check_merge,
        parse=str,
        metavar="PLANNER",
    )
    density_range: tuple[float, float] | None = setting(
        None,
        "with merge: the least and the largest density of a group; each gets what backward can hide (LAGS)",
        check=_check_range,
        metavar="LOW:HIGH",
    )
    diagnose_every: int = setting(
        0,
        "steps between measurements of how much better than chance a group's selection is, each of which costs a dense"
        " exchange; 0 is never",
        check=_check_every,
        metavar="STEPS",
    )
    dense_below: int = setting(
        1024, "groups with fewer elements than this go dense", check=_check_elements, metavar="N"
    )
    clip_norm: float | None = setting(
        None,
        "clip gradients to this norm, as `clip_grad_norm_` would, but before the selection: each worker's own, over the"
        " whole model, to sqrt(workers) times this",
        check=_check_norm,
        parse=float,
        metavar="NORM",
    )
    transport: str = setting(
        "auto",
        "who moves the bytes: connections of our own on a CPU (auto), torch, or mpi",
        choices=TRANSPORTS,
    )
    paranoid: int = setting(
        0,
        "steps between comparisons of all ranks' weights, by their hashes; 0 is never. Messages then carry checksums",
        check=_check_every,
        metavar="STEPS",
    )
    encrypt: str | None = setting(
        None,
        "a file with a key and a certificate that all ranks have: connections between them are encrypted, and nobody"
        " without it can join (SECURITY.md)",
        check=_check_key,
        parse=str,
        metavar="FILE",
    )
    timeout: float = setting(
        300.0, "seconds that any wait for a peer may take", check=_check_timeout, metavar="SECONDS"
    )
    options: Any = None  # the method's own

    def __init__(self, **settings: Any) -> None:
        common = {each.name: each.default for each in dataclasses.fields(self)}
        given = {name: settings.pop(name) for name in list(settings) if name in common}
        for name, value in (common | given).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "options", _options(self.method, given.get("options"), settings))
        self._check()

    def _check(self) -> None:
        check_settings(self)
        if self.merge is not None and self.groups != "model":
            raise ConfigError(f"give merge={self.merge!r} or groups={self.groups!r}, not both: merging makes groups.")
        if self.density_range is not None and self.merge is None:
            raise ConfigError('density_range needs a plan to fit densities to; add merge="exact".')

    def with_method(self, method: str) -> "SyncConfig":
        """Another method with these settings, and with those of the options that both methods have."""
        known = {each.name for each in dataclasses.fields(method_class(method).Options)}
        kept = {name: value for name, value in vars(self.options).items() if name in known}
        return SyncConfig(**{**self._common(), "method": method, **kept})

    @property
    def is_dense(self) -> bool:
        """Whether everything is sent in every step."""
        return method_class(self.method).about.dense

    def teams_of(self, workers: int) -> int:
        """How many teams so many workers form: one, for methods that have none."""
        count = getattr(self.options, "teams_of", None)
        return count(workers) if count is not None else 1

    def check_for(self, workers: int) -> None:
        """Raise `ConfigError` if these settings cannot work with so many workers."""
        self.options.check_for(workers)

    def density_at(self, step: int) -> float:
        """The density of step `step`, counted from 0."""
        return self.schedule.at(step)

    @property
    def schedule(self) -> DensitySchedule:
        """The density over steps."""
        return DensitySchedule.of(self.density)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, the method's options beside the others, as plain values."""
        common = {name: _plain(value) for name, value in self._common().items()}
        return {**common, **dataclasses.asdict(self.options)}

    def _common(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "options"}


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _options(method: str, options: Any, settings: Mapping[str, Any]) -> Any:
    """The method's options: those given as an object, with these settings on top."""
    kind = method_class(method).Options
    if options is not None and type(options) is not kind:
        raise ConfigError(
            f"{type(options).__name__} are not the options of {method}; give {kind.__name__}, or the options by name."
        )
    known = [each.name for each in dataclasses.fields(kind)]
    for name in settings:
        if name not in known:
            raise _unknown(name, method, known)
    return dataclasses.replace(options, **settings) if options is not None else kind(**settings)


def _unknown(name: str, method: str, known: list[str]) -> ConfigError:
    """What to say of a setting that the method does not have: whose it is, or what was meant."""
    owners = [other for other in method_names() if name in options_of(other)]
    if owners:
        return ConfigError(
            f"{method} has no option {name!r}, which is {_listed(owners)}'s; leave it out, or choose that."
        )
    common = [each.name for each in dataclasses.fields(SyncConfig) if each.name != "options"]
    try:
        check_choice("setting", name, (*common, *known))
    except ConfigError as error:
        return error
    return ConfigError(f"{method} has no option {name!r}.")


def options_of(method: str) -> dict[str, "dataclasses.Field[Any]"]:
    """The options of a method, by name."""
    return {each.name: each for each in dataclasses.fields(method_class(method).Options)}


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def configure(config: SyncConfig | None, settings: dict[str, Any]) -> SyncConfig:
    """`config`, or the defaults, with these settings on top. Another method keeps the options that it knows."""
    config = config or SyncConfig(**({"method": settings["method"]} if "method" in settings else {}))
    if "method" in settings and settings["method"] != config.method:
        config = config.with_method(settings["method"])
    return dataclasses.replace(config, **settings) if settings else config


def configure_vector(config: SyncConfig | None, settings: dict[str, Any]) -> SyncConfig:
    """`configure`, for one vector without a model: settings that only a model's gradient has a use for are refused."""
    found = configure(config, settings)
    for each in dataclasses.fields(SyncConfig):
        if each.name in OF_A_MODEL and getattr(found, each.name) != each.default:
            raise ConfigError(f"{each.name} is about the gradients of a model, and this is one vector; leave it out.")
    return found
