"""Settings: what a user chooses, checked where it is chosen. No torch here, so the command line starts fast."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spardl.errors import ConfigError

Gather = Literal["auto", "r", "b"]
Blocks = Literal["interleaved", "contiguous"]
Residuals = Literal["carry", "return", "partial", "local"]
Values = Literal["fp32", "bf16", "fp16", "int8"]
Indices = Literal["rice", "raw"]
Selection = Literal["lazy", "eager"]
Rebalance = Literal["prefix", "neighbour"]
Threshold = Literal["quantile", "published"]
Transport = Literal["auto", "torch", "mpi"]

LONGEST_TIMEOUT = 31 * 24 * 3600.0

MERGES = ("exact", "omgs", "mgwfbp", "layer", "single", "size:N")

# A method is one file plus one line here.
METHODS: dict[str, str] = {
    "dense": "spardl.collectives.dense:Dense",
    "dense-ring": "spardl.collectives.dense:DenseRing",
    "dense-rhd": "spardl.collectives.dense:DenseHalvingDoubling",
    "topka": "spardl.collectives.topka:TopkA",
    "topka2": "spardl.collectives.topka:TopkA2",
    "topkdsa": "spardl.collectives.topkdsa:TopkDSA",
    "gtopk": "spardl.collectives.gtopk:GTopk",
    "oktopk": "spardl.collectives.oktopk:OkTopk",
    "exdyna": "spardl.collectives.exdyna:ExDyna",
    "micro": "spardl.collectives.exdyna:MiCRO",
    "deft": "spardl.collectives.deft:Deft",
    "spardl": "spardl.collectives.spardl:SparDL",
}


@dataclass(frozen=True)
class DensitySchedule:
    """Density over steps: dense for `dense_steps`, then from `start` down to `target` geometrically over `steps`."""

    target: float
    start: float = 1.0
    steps: int = 0
    dense_steps: int = 0

    def __post_init__(self) -> None:
        check_density(self.target)
        check_density(self.start)
        for steps in (self.steps, self.dense_steps):
            if not is_count(steps):
                raise ConfigError(f"a density schedule cannot last {steps!r} steps; use a whole number from 0 on.")

    def at(self, step: int) -> float:
        """The density of step `step`, counted from 0."""
        if step < self.dense_steps:
            return 1.0
        progress = (step - self.dense_steps) / self.steps if self.steps else 1.0
        if progress >= 1.0:
            return self.target
        return float(self.start * (self.target / self.start) ** progress)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How gradients are synchronised. The same names are keywords of `attach` and options of every command.

    method      a name that `spardl methods` lists
    density     share of entries that a step may send, in (0, 1], or a `DensitySchedule`
    teams       number of teams (SparDL): a divisor of the worker count, or "auto"
    gather      how teams agree: "r" recursive doubling (a power of two), "b" Bruck (any count), or "auto"
    blocks      "interleaved" (each block samples all layers) or "contiguous" (the paper)
    residuals   what happens to entries that did not survive: "carry" stays where it was dropped, "return" goes back to
                its owner (the paper); "partial" and "local" lose some, for ablation
    values      format on the wire; the rounding error stays with the sender
    indices     "rice" (close to entropy) or "raw" (int32, for comparison)
    selection   "lazy" cuts a block once, before it is sent; "eager" before and after every addition
    rebalance   how ExDyna moves its partitions: "prefix" shares, or between "neighbour"s as published
    threshold   how ExDyna and MiCRO follow their target: "quantile" with trend, or the "published" rule
    groups      "model", "bucket" (as DDP delivers), or the largest number of elements in a group
    merge       let a planner choose the groups, after a few steps: "exact", "omgs", "mgwfbp", "size:N", "layer" or
                "single"; exchanges then overlap with backward
    density_range  with `merge`: the least and the largest density of a group, such as (0.001, 0.1), to choose for each
                what backward can hide (LAGS), dense where that fits
    delta_every measure every so many steps how much better than chance a group's selection is (costs a dense exchange)
    dense_below groups with fewer elements than this go dense
    local_clip  clip the norm of each worker's own gradient to this over sqrt(workers), before it is accumulated
    transport   who moves the bytes: "auto" (connections of our own on a CPU, else torch), "torch" (torch.distributed)
                or "mpi" (mpi4py)
    timeout     seconds that any wait for a peer may take
    """

    method: str = "spardl"
    density: float | DensitySchedule = 0.01
    teams: int | Literal["auto"] = "auto"
    gather: Gather = "auto"
    blocks: Blocks = "interleaved"
    residuals: Residuals = "carry"
    values: Values = "bf16"
    indices: Indices = "rice"
    selection: Selection = "lazy"
    rebalance: Rebalance = "prefix"
    threshold: Threshold = "quantile"
    groups: int | Literal["model", "bucket"] = "model"
    merge: str | None = None
    density_range: tuple[float, float] | None = None
    delta_every: int = 0
    dense_below: int = 1024
    local_clip: float | None = None
    transport: Transport = "auto"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        check_choice("method", self.method, tuple(METHODS), hint="`spardl methods` lists them")
        if not isinstance(self.density, DensitySchedule):
            check_density(self.density)
        check_choice("gather", self.gather, get_args(Gather))
        check_choice("blocks", self.blocks, get_args(Blocks))
        check_choice("residuals", self.residuals, get_args(Residuals))
        check_choice("values", self.values, get_args(Values))
        check_choice("indices", self.indices, get_args(Indices))
        check_choice("selection", self.selection, get_args(Selection))
        check_choice("rebalance", self.rebalance, get_args(Rebalance))
        check_choice("threshold", self.threshold, get_args(Threshold))
        check_choice("transport", self.transport, get_args(Transport))
        if isinstance(self.groups, str):
            check_choice("groups", self.groups, ("model", "bucket"), hint="or give the largest number of elements")
        elif not is_count(self.groups, least=1):
            raise ConfigError(
                f'groups of at most {self.groups!r} elements hold nothing; give 1 or more, or groups="model".'
            )
        self._check_merging()
        if self.teams != "auto" and not is_count(self.teams, least=1):
            raise ConfigError(f'teams={self.teams!r} is not a number of teams; give 1 or more, or teams="auto".')
        if not is_count(self.dense_below):
            raise ConfigError(f"dense_below={self.dense_below!r} is not a number of elements; give 0 or more.")
        if self.local_clip is not None and not (is_number(self.local_clip) and self.local_clip > 0):
            raise ConfigError(f"local_clip={self.local_clip!r} leaves no gradient; give a positive norm or None.")
        if not (is_number(self.timeout) and 0 < self.timeout <= LONGEST_TIMEOUT):
            raise ConfigError(
                f"timeout={self.timeout!r} is no time to wait; give a number of seconds above 0, at most a month."
            )

    def _check_merging(self) -> None:
        if self.merge is not None:
            check_merge(self.merge)
            if self.groups != "model":
                raise ConfigError(
                    f"give merge={self.merge!r} or groups={self.groups!r}, not both: merging makes groups."
                )
        if self.density_range is not None:
            if self.merge is None:
                raise ConfigError('density_range needs a plan to fit densities to; add merge="exact".')
            floor, ceiling = self.density_range
            check_density(floor)
            check_density(ceiling)
            if floor > ceiling:
                raise ConfigError(f"density_range begins with {floor}, above its end {ceiling}; swap them.")
        if not is_count(self.delta_every):
            raise ConfigError(
                f"delta_every={self.delta_every!r} is not a number of steps; give 1 or more, or 0 for never."
            )

    def density_at(self, step: int) -> float:
        return self.density.at(step) if isinstance(self.density, DensitySchedule) else float(self.density)

    def resolved_teams(self, workers: int) -> int:
        """The number of teams for this worker count; "auto" is two for even counts (as cheap as one, a round less)."""
        if self.teams == "auto":
            return 2 if workers % 2 == 0 else 1
        check_teams(workers, self.teams, self.gather)
        return self.teams

    def resolved_gather(self, workers: int) -> Literal["r", "b"]:
        teams = self.resolved_teams(workers)
        if self.gather == "auto":
            return "r" if is_power_of_two(teams) else "b"
        return self.gather

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def configure(config: SyncConfig | None, settings: dict[str, Any]) -> SyncConfig:
    """`config`, or the defaults, with these settings on top."""
    unknown = sorted(settings.keys() - SyncConfig.__dataclass_fields__.keys())
    if unknown:
        known = tuple(SyncConfig.__dataclass_fields__)
        check_choice("setting", unknown[0], known)
    config = config or SyncConfig()
    return dataclasses.replace(config, **settings) if settings else config


def check_density(density: float) -> None:
    if not (is_number(density) and 0 < density <= 1):
        raise ConfigError(f"density {density} is outside (0, 1]; 0.01 sends one entry in a hundred, 1 sends all.")


def check_merge(name: str) -> None:
    kind, colon, number = str(name).partition(":")
    if kind != "size":
        check_choice("merge", name, MERGES)
    elif not (colon and number.isascii() and number.isdigit() and int(number)):
        raise ConfigError(f"merge={name!r} names no size; give a number of elements, such as size:8192.")


def check_teams(workers: int, teams: int, gather: str) -> None:
    if workers % teams:
        divisors = ", ".join(str(d) for d in range(1, workers + 1) if workers % d == 0)
        raise ConfigError(
            f"{workers} workers cannot form {teams} equal teams;"
            f' choose teams from {divisors} or leave it to teams="auto".'
        )
    if gather == "r" and not is_power_of_two(teams):
        raise ConfigError(f'gather="r" needs a power of two of teams, not {teams}; use gather="b" or gather="auto".')


def check_choice(name: str, given: str, choices: Sequence[str], hint: str = "") -> None:
    if given in choices:
        return
    begun = [choice for choice in choices if given and choice.startswith(str(given))]
    near = begun or difflib.get_close_matches(str(given), choices, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    listing = ", ".join(choices) + (f" ({hint})" if hint else "")
    raise ConfigError(f"there is no {name} {given!r}.{guess} Choose from {listing}.")


def is_number(given: object) -> bool:
    """A finite real number of any kind, numpy's included."""
    return isinstance(given, numbers.Real) and math.isfinite(given)


def is_count(given: object, least: int = 0) -> bool:
    return isinstance(given, numbers.Integral) and int(given) >= least


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
