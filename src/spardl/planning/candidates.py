"""Candidates: ways to synchronise a model that can be compared, and what each needs of the network.

What a way does to learning decides with what it may be compared. The share of entries that a step sends, the format of
values and the update rule are the user's to choose; methods, teams and merged groups under the same three are rivals in
time alone, and so is dense, which sends everything.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spardl.choices import is_power_of_two
from spardl.collectives.methods.registry import method_class, method_names
from spardl.config import SyncConfig, configure, options_of
from spardl.planning.links import Links
from spardl.planning.placing import Placement, placements
from spardl.update import LocalUpdates
from spardl.wire.format import value_format

DENSE = "dense"
# The same dense result by messages of our own, and a variant that takes longer than what it varies.
NOT_RIVALS = ("dense-ring", "dense-rhd", "topka2")
TEAM_COUNTS = 3  # of all that are possible, those whose messages take least

INDEX_BITS = 1.46  # of a Rice-coded index, beside log2 of one over the density
FLOAT_BYTES = 4

OTHER_DENSITIES = (0.1, 0.01, 0.001)
OTHER_VALUES = ("int8",)
OTHER_RULES = (LocalUpdates(), LocalUpdates(delay=1), LocalUpdates(every=5), LocalUpdates(every=5, delay=1))


@dataclass(frozen=True)
class Candidate:
    """One way: settings, and the rule of local updates, or None for gradients. `halved`: torch's own hook, which rounds
    a dense gradient to fp16 and keeps no error; nothing of ours does that, so it is only shown."""

    config: SyncConfig
    rule: LocalUpdates | None = None
    halved: bool = False

    @property
    def is_dense(self) -> bool:
        return self.config.is_dense

    @property
    def density(self) -> float:
        return 1.0 if self.is_dense else self.config.schedule.final

    def settings(self) -> dict[str, Any]:
        """The keywords of `attach` that make it, without those that say what it would do anyway. Plain values."""
        found: dict[str, Any] = {"method": self.config.method}
        if not self.is_dense:
            found["density"] = self.density
        found |= _changed(self.config, skipped=("method", "density", "options", "timeout", "transport"))
        found |= {name: value for name, value in vars(self.config.options).items() if self._is_set(name, value)}
        if self.rule is not None:
            found |= {"update": "local", **_changed(self.rule)}
        return found

    def _is_set(self, name: str, value: Any) -> bool:
        return bool(value != options_of(self.config.method)[name].default)

    def python(self) -> str:
        """The line that makes it, in a training script."""
        if self.halved:
            return "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"
        if self.is_dense and self.rule is None:
            return "model = DistributedDataParallel(model)  # as it is: nothing beats it here"
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"sync = spardl.attach(model, optimizer=optimizer, {given})"

    @property
    def title(self) -> str:
        """What people call it."""
        words = ["torch's fp16 hook" if self.halved else self.config.method]
        teams = getattr(self.config.options, "teams", "auto")
        if teams != "auto":
            words.append(f"{teams} team{'s' if teams != 1 else ''}")
        if not isinstance(getattr(self.config.options, "order", ""), str):
            words.append("placed by nearness")
        if self.config.merge is not None:
            words.append("merged groups")
        return ", ".join(words)

    @property
    def course(self) -> str:
        """What it does to learning: ways of one course differ in time alone."""
        sent = (
            "everything in fp16"
            if self.halved
            else "everything"
            if self.is_dense
            else f"{100 * self.density:g} % in {self.config.values}"
        )
        if self.rule is None:
            return f"gradients, {sent}"
        late = f", {self.rule.delay} late" if self.rule.delay else ""
        return f"local updates every {self.rule.every}{late}, {sent}"


def _changed(settings: Any, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Fields that are not what they are by default."""
    fields = (each for each in dataclasses.fields(settings) if each.name not in skipped)
    return {each.name: getattr(settings, each.name) for each in fields if getattr(settings, each.name) != each.default}


@dataclass(frozen=True, slots=True)
class Need:
    """What one exchange takes: messages that follow one another, bytes that the busiest rank sends."""

    rounds: float
    bytes: float

    def seconds(self, latency: float, rate: float) -> float:
        """rounds x latency + bytes / rate."""
        return self.rounds * latency + self.bytes / rate


def need(config: SyncConfig, workers: int, elements: int) -> Need:
    """By the method's own formulas: rounds, entries, and the bits that an entry takes."""
    if workers < 2:
        return Need(0.0, 0.0)
    about, teams = method_class(config.method).about, config.teams_of(workers)
    density = 1.0 if about.dense else config.schedule.final
    names = {"P": workers, "d": teams, "n": elements, "k": max(1, round(density * elements))}
    low, high = about.entries.range(**names)
    exact = config.method == "spardl" and is_power_of_two(teams)  # recursive doubling sends the least
    entries = low if exact else (low + high) / 2
    if about.dense:
        size = float(FLOAT_BYTES)
    else:
        size = (value_format(config.values).bits + math.log2(1 / density) + INDEX_BITS) / 8
    return Need(sum(about.rounds.range(**names)) / 2, entries * size)


def need_of(candidate: Candidate, workers: int, elements: int) -> Need:
    """What one exchange of a candidate takes."""
    found = need(candidate.config, workers, elements)
    return Need(found.rounds, found.bytes / 2) if candidate.halved else found


def rivals(asked: SyncConfig, rule: LocalUpdates | None, links: Links, elements: int) -> Iterator[Candidate]:
    """Ways of one course, that of `asked`, and dense before them; methods in the registry's order.

    Of team counts there are only those whose messages would take least on such lines, the quickest first.
    """
    yield Candidate(configure(asked.with_method(DENSE), {"density": 1.0}), rule)
    for method in method_names():
        if method in NOT_RIVALS or method_class(method).about.dense:
            continue
        config = asked.with_method(method)
        for counted in dict.fromkeys(by_teams(config, links, elements)[:TEAM_COUNTS]):
            yield Candidate(counted, rule)


def by_teams(config: SyncConfig, links: Links, elements: int) -> list[SyncConfig]:
    """This method with each number of teams that it may have, formed of ranks that are close to each other, the
    quickest by formula first; as it is, if it has none, or if the number was given."""
    if getattr(config.options, "teams", None) != "auto":
        return [config]
    density, given = config.schedule.final, config.options.order
    order = None if isinstance(given, str) else given
    found = placements(links, max(1, round(density * elements)), density, order)
    return [_placed(config, each) for each in found]


def _placed(config: SyncConfig, placement: Placement) -> SyncConfig:
    teams, order = placement
    if order == tuple(range(len(order))):
        return configure(config, {"teams": teams})
    return configure(config, {"teams": teams, "order": order})


def others(best: SyncConfig, rule: LocalUpdates | None) -> Iterator[Candidate]:
    """Ways of another course, made of the best one: other densities, values and update rules, one thing at a time."""
    yield Candidate(configure(best.with_method(DENSE), {"density": 1.0, "merge": None}), halved=True)
    for density in OTHER_DENSITIES:
        if density != best.schedule.final:
            yield Candidate(configure(best, {"density": density}), rule)
    for values in OTHER_VALUES:
        if values != best.values:
            yield Candidate(configure(best, {"values": values}), rule)
    plain = configure(best, {"merge": None, "density_range": None, "clip_norm": None})
    for other in OTHER_RULES:
        if other != rule:
            yield Candidate(plain, other)
            if other.every > 1 and not other.delay:
                yield Candidate(configure(plain.with_method(DENSE), {"density": 1.0}), other)
    if rule is not None:
        yield Candidate(best, None)
