"""Update rules: what is synchronised, gradients before a step or weights after it. No torch here.

With **gradients** (the papers' way) ranks agree on a sparse mean gradient, and all step by it. With **local updates**
every rank steps its own, unmodified optimizer on weights of its own, and what is exchanged, sparsely, is how far these
have come from the shared ones. A preset is a published way of doing that, as settings.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spardl.choices import check_choice, check_settings, is_count, is_number, setting
from spardl.density import check_density
from spardl.errors import ConfigError

GRADIENTS = "gradients"


def _check_every(name: str, given: Any) -> None:
    if not is_count(given, least=1):
        raise ConfigError(f"{name}={given!r} is not a number of local steps; give 1 or more.")


def _check_delay(name: str, given: Any) -> None:
    if not is_count(given):
        raise ConfigError(f"{name}={given!r} is not a number of steps; give 0, or up to every=.")


def _check_rate(name: str, given: Any) -> None:
    if given != "auto" and not (is_number(given) and given > 0):
        raise ConfigError(f'{name}={given!r} moves nothing; give a positive number, or {name}="auto".')


def _check_share(name: str, given: Any) -> None:
    if not (is_number(given) and 0 <= given < 1):
        raise ConfigError(f"{name}={given!r} never fades; give a number from 0 to below 1.")


def _check_kept(name: str, given: Any) -> None:
    if not (is_number(given) and 0 < given <= 1):
        raise ConfigError(f"{name}={given!r} is no share of what waits; give a number above 0, at most 1.")


def _check_switch(name: str, given: Any) -> None:
    if not isinstance(given, bool):
        raise ConfigError(f"{name}={given!r} is neither True nor False.")


def _check_patience(name: str, given: Any) -> None:
    if given is not None and not (is_number(given) and given > 0):
        raise ConfigError(f"{name}={given!r} is no time to wait; give seconds above 0, or leave it out.")


def _check_limits(name: str, given: Any) -> None:
    low, high = given
    check_density(low)
    check_density(high)
    if low > high:
        raise ConfigError(f"{name} begins with {low}, above its end {high}; swap them.")


@dataclass(frozen=True)
class LocalUpdates:
    """How weights are exchanged that every rank steps by itself."""

    every: int = setting(1, "local steps from one exchange to the next", check=_check_every, metavar="STEPS")
    delay: int = setting(
        0,
        "steps that an exchange may take while training goes on; 0 waits for it",
        check=_check_delay,
        metavar="STEPS",
    )
    apply: str = setting(
        "ahead",
        "what a rank has not sent stays applied to its own weights (ahead), or is kept aside while these become the"
        " shared ones again (reset)",
        choices=("ahead", "reset"),
    )
    outer: str = setting(
        "plain",
        "what moves the shared weights by the agreed mean: plain steps, momentum, nesterov, or sign, a step of the"
        " learning rate in the direction of each entry",
        choices=("plain", "momentum", "nesterov", "sign"),
    )
    outer_rate: float | str = setting(
        "auto",
        "factor of the agreed mean; auto makes up for entries that only some workers send",
        check=_check_rate,
        parse=lambda text: text if text == "auto" else float(text),
        metavar="RATE",
    )
    outer_momentum: float = setting(0.9, "of outer momentum and nesterov", check=_check_share, metavar="SHARE")
    sent_momentum: str = setting(
        "auto",
        "what becomes of the optimizer's momentum where an entry was sent: it is kept, or restarted from zero; auto"
        " restarts that of SGD",
        choices=("auto", "kept", "restarted"),
    )
    residual_decay: float = setting(
        1.0,
        "what remains, from one exchange to the next, of what waits; 1 loses nothing",
        check=_check_kept,
        metavar="SHARE",
    )
    pace: str = setting(
        "even",
        "how many of the `every` steps a rank takes: all (even), or, if it is slower than others, as many as fit into"
        " their time (fitted; a script asks `sync.rests()` before each)",
        choices=("even", "fitted"),
    )
    adaptive: bool = setting(
        False,
        "send what the line carries while training computes, instead of a given density; needs a delay",
        check=_check_switch,
    )
    density_limits: tuple[float, float] = setting(
        (0.001, 0.1),
        "the least and the largest share of entries that an adaptive exchange sends",
        check=_check_limits,
        metavar="LOW:HIGH",
    )
    transform: str = setting(
        "none",
        "what entries are selected of: weights, or with reset, dct coefficients of tiles of 64 x 64",
        choices=("none", "dct"),
    )
    on_loss: str = setting(
        "stop",
        "when a rank is lost, all others stop with an error that names it, or those that are left continue without it",
        choices=("stop", "continue"),
    )

    patience: float | None = setting(
        None,
        "seconds after which a rank that is late is not waited for any more, with on_loss continue: it joins the others"
        " when it comes, and what it computed counts",
        check=_check_patience,
        parse=float,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.patience is not None and self.on_loss != "continue":
            raise ConfigError('patience is for runs whose ranks may go on without one; give on_loss="continue" too.')
        if self.delay > self.every:
            raise ConfigError(
                f"an exchange every {self.every} step(s) cannot land {self.delay} steps late; give delay="
                f"{self.every} or less."
            )
        if self.pace == "fitted" and self.every == 1:
            raise ConfigError(
                'pace="fitted" gives slower ranks fewer of the steps between two exchanges; give every=2 or more.'
            )
        if self.adaptive and not self.delay:
            raise ConfigError(
                "an adaptive density fills the time that an exchange has beside training; give delay=1 too."
            )
        if self.transform != "none" and self.apply != "reset":
            raise ConfigError(f'transform="{self.transform}" keeps what waits aside; give apply="reset" too.')
        if self.outer == "sign" and self.outer_rate != "auto":
            raise ConfigError('outer="sign" steps by the optimizer\'s own learning rate; leave outer_rate out.')
        if self.delay and self.apply == "reset":
            raise ConfigError('apply="reset" waits for every exchange; leave delay out, or use apply="ahead".')

    def rate(self, workers: int, density: float, *, bold: bool) -> float:
        """The factor of the agreed mean; `bold`: optimizers do not follow a long step with longer ones."""
        if not isinstance(self.outer_rate, str):
            return float(self.outer_rate)
        if self.apply == "reset" or self.outer != "plain":
            return 1.0
        sparse = math.log(density) / math.log(AUTO_DENSITY)
        power = min(1.0, sparse * BOLD_POWER) if bold else min(1.0, sparse) * CAUTIOUS_POWER
        return float(workers**power)


LATE = 1.1  # times the quickest rank's time that a rank may take: where steps scatter, few are given up


def fitted_steps(every: int, seconds: Sequence[float]) -> list[int]:
    """How many steps each rank takes where the quickest takes `every`, given the seconds of one: at least one.

    As many as it can do by the time that the quickest is done, or a tenth later. A rank of which nothing is known takes
    all.
    """
    known = [each for each in seconds if each > 0]
    if not known:
        return [every] * len(seconds)
    time = LATE * every * min(known)
    return [min(every, max(1, math.floor(time / each))) if each > 0 else every for each in seconds]


# A mean counts a move of one worker alone as 1/P of a move. So sparse means are too short, the more so the more workers
# there are and the fewer entries two of them send together: by a power of P at 1 %, by P itself, which makes the mean a
# sum, from 0.3 % down, by nothing where all is sent. SGD whose momentum does not start anew follows a long step with
# longer ones, so it gets less (docs/convergence.md has the figures).
BOLD_POWER = 0.8
CAUTIOUS_POWER = 0.5
AUTO_DENSITY = 0.01

# Each preset: fields of `LocalUpdates`, and synchronisation settings that it has instead of the defaults.
PRESETS: dict[str, dict[str, Any]] = {
    # Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    "local-sgd": {"every": 10, "apply": "reset", "outer_rate": 1.0, "density": 1.0},
    # Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    "diloco": {
        "every": 50,
        "apply": "reset",
        "outer": "nesterov",
        "outer_rate": 0.7,
        "outer_momentum": 0.9,
        "density": 1.0,
    },
    # Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. `mean="senders"` as released.
    "sparseloco": {
        "every": 15,
        "apply": "reset",
        "residual_decay": 0.95,
        "outer_rate": 1.0,
        "method": "chunktopk",
        "density": 1 / 32,
    },
    # Peng, Quesnelle and Kingma, "Decoupled Momentum Optimization", 2024. Its optimizer is plain SGD, and what decays
    # here is its momentum.
    "demo": {
        "every": 1,
        "apply": "reset",
        "residual_decay": 0.999,
        "outer": "sign",
        "transform": "dct",
        "method": "chunktopk",
        "mean": "senders",
        "density": 1 / 128,
    },
}

# Synchronisation settings that only gradients have a use for, and what to do instead.
OF_GRADIENTS = {
    "merge": "leave it out",
    "density_range": "leave it out",
    "clip_norm": "clip gradients as usual, before the optimizer steps",
    "diagnose_every": "leave it out",
}

NAMES = tuple(each.name for each in dataclasses.fields(LocalUpdates))
RULES = (GRADIENTS, "local", *PRESETS)


def resolve(update: "str | LocalUpdates", settings: Mapping[str, Any]) -> "tuple[LocalUpdates | None, dict[str, Any]]":
    """The update rule, None for gradients, and what of the settings is about synchronisation.

    Raises:
        ConfigError: no such rule, or a setting of local updates where gradients are synchronised.
    """
    own = {name: value for name, value in settings.items() if name in NAMES}
    others = {name: value for name, value in settings.items() if name not in NAMES}
    if others.get("density") == "auto":
        del others["density"]
        own["adaptive"] = True
    if isinstance(update, LocalUpdates):
        return dataclasses.replace(update, **own), others
    check_choice("update", update, RULES)
    if update == GRADIENTS:
        if own.get("on_loss") == "continue":
            raise ConfigError(
                'on_loss="continue" needs weights of each rank\'s own: the process group that averages gradients ends'
                ' with its first member. Give update="local" too, or restart from a checkpoint (torchrun'
                " --max-restarts)."
            )
        if own:
            raise ConfigError(f'{next(iter(own))} is a setting of local updates; give update="local" too.')
        return None, others
    preset = PRESETS.get(update, {})
    rule = {name: value for name, value in preset.items() if name in NAMES}
    return LocalUpdates(**{**rule, **own}), {**{n: v for n, v in preset.items() if n not in NAMES}, **others}


def check_beside(config: Any) -> None:
    """Raise `ConfigError` if this configuration asks for something that local updates have no use for."""
    for each in dataclasses.fields(config):
        if each.name in OF_GRADIENTS and getattr(config, each.name) != each.default:
            raise ConfigError(f"{each.name} is about gradients; with local updates {OF_GRADIENTS[each.name]}.")
