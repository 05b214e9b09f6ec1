"""`spardl plan` on real ranks: which settings make this model's steps shortest here, and by how much."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spardl.cli.output import as_bytes, as_rate, as_ratio, as_seconds, check_target, records, table
from spardl.cli.ranks import run_on_ranks
from spardl.cli.updates import chosen_update
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.launch.place import Place
from spardl.train.data import check_packages
from spardl.train.recipes import choose_recipe

if TYPE_CHECKING:
    from spardl.integrations.contest import Contest
    from spardl.integrations.rehearsal import Rehearsal
    from spardl.planning.choose import Compute, Offer
    from spardl.planning.planfile import PlanFile
    from spardl.planning.survey import Survey

COLUMNS = ("way", "step", "exposed", "sent", "against dense", "dense as fast at")


def choose(options: argparse.Namespace, config: SyncConfig) -> int:
    """Rehearse a recipe or a script, survey the network, print what wins, and write it where it was asked for."""
    if options.script is not None and options.recipe is not None:
        raise ConfigError("give --recipe or --script, not both.")
    _check_alone(options)
    rule, config = chosen_update(options, options.update, configure(config, {"merge": None}))
    if config.is_dense:
        raise ConfigError(f"{config.method} is what everything is compared with; leave --method out.")
    rehearsed = _subject(options)
    check_target(None if options.out is None else str(options.out))

    def work(place: Place) -> None:
        from spardl.integrations.contest import Contest

        if place.workers == 1:
            raise ConfigError("one worker has nobody to synchronise with; give --workers 2 or more.")
        contest = Contest(config, rule)
        rehearsal = rehearsed(contest)
        if contest.survey is None:  # it ended before it was told to
            contest.begin(rehearsal, None)
        found, survey, compute = contest.result(), contest.survey, contest.compute
        assert survey is not None
        if place.rank == 0:
            best, rivals, others = found
            with records(options.json) as write:
                for offer in [*rivals, *others]:
                    write({**offer.to_dict(), "wins": offer is best, **survey.to_dict()})
            if options.out is not None:
                plan_of(best, survey, rehearsal).write(options.out)
            if options.json != "-":
                show(_name(options), survey, compute, best, rivals, others)
                if options.out is not None:
                    print(f"Written to {options.out}: attach(plan={str(options.out)!r}) and train --plan take it up.")

    return run_on_ranks(options, [config], work)


def _check_alone(options: argparse.Namespace) -> None:
    """Options that describe a network have no meaning where one is measured."""
    for name in ("shape", "backward", "latency", "bandwidth", "selection_rate", "published"):
        if name in options.given and options.script is None:
            raise ConfigError(
                f"--{name.replace('_', '-')} describes a network, and this one is measured; leave it out."
            )


def _name(options: argparse.Namespace) -> str:
    return str(options.recipe or options.script[0])


def _subject(options: argparse.Namespace) -> "Callable[[Contest], Rehearsal]":
    """What is rehearsed, checked before any rank starts."""
    if options.recipe is not None:
        batch = {} if options.batch_size is None else {"batch_size": options.batch_size}
        recipe = choose_recipe(options.recipe, given=batch)
        check_packages(recipe.data)

        def from_recipe(contest: "Contest") -> "Rehearsal":
            from spardl.train.loop import rehearse_recipe

            return rehearse_recipe(recipe, contest, data_dir=options.data_dir)

        return from_recipe
    if not options.script:
        raise ConfigError("--script names no file; give it last, with whatever it takes.")
    path, arguments = Path(options.script[0]), options.script[1:]
    if not path.is_file():
        raise ConfigError(f"there is no script {path}.")

    def from_script(contest: "Contest") -> "Rehearsal":
        from spardl.integrations.rehearsal import rehearse_script

        return rehearse_script(path, arguments, contest)

    return from_script


def plan_of(best: "Offer", survey: "Survey", rehearsal: "Rehearsal") -> "PlanFile":
    """The winner as a file has it."""
    from spardl.planning.planfile import PlanFile, digest_of
    from spardl.update import GRADIENTS

    settings = best.candidate.settings()
    update = settings.pop("update", GRADIENTS)
    rate = survey.links.rate
    predicted = {
        "step_s": best.step,
        "exposed_s": best.exposed,
        "speedup_vs_dense": best.speedup,
        "latency_s": survey.links.latency,
        "bytes_per_second": rate if math.isfinite(rate) else None,
    }
    elements = sum(rehearsal.sizes.values())
    return PlanFile(survey.links.workers, elements, digest_of(rehearsal.sizes), update, settings, predicted)


def show(
    name: str,
    survey: "Survey",
    compute: "Compute",
    best: "Offer",
    rivals: "Sequence[Offer]",
    others: "Sequence[Offer]",
) -> None:
    """The ranked table, what would change learning, and the line that applies the winner."""
    links = survey.links
    print(
        f"{name}: {survey.elements:,} parameters, {links.workers} workers; a step computes {as_seconds(compute.total)}"
        f" (forward {as_seconds(compute.forward)}, backward {as_seconds(compute.backward)}, optimizer"
        f" {as_seconds(compute.optimizer)})."
    )
    shared = "; ranks share cores" if survey.crowded else ""
    print(
        f"Lines: {as_seconds(links.latency)} per message, {as_rate(_rounded(links.rate))}{_regions(survey)}{shared}.\n"
    )
    course = next(offer.candidate.course for offer in rivals if not offer.candidate.is_dense)
    table(
        f"What differs in time alone: {course}; and dense, which sends everything",
        COLUMNS,
        [_row(offer, _named(offer, best)) for offer in rivals],
        note="measured: in steps of this training; others are predicted. exposed: what a step waits for beyond"
        " computing. The last column: from this rate on dense wins",
    )
    table(
        "What also changes learning, so that it is yours to decide (docs/convergence.md)",
        COLUMNS,
        [_row(offer, f"{offer.candidate.course}: {offer.candidate.title}") for offer in others],
        note="predicted from exchanges of the same method",
    )
    if best.candidate.is_dense:
        print('\nDense wins here: leave DDP as it is, or let attach(method="auto") look again while training.')
    print(f"\n    {best.candidate.python()}\n")


def _named(offer: "Offer", best: "Offer") -> str:
    how = " (measured)" if offer.measured else ""
    return offer.candidate.title + how + (" <- wins" if offer is best else "")


def _row(offer: "Offer", title: str) -> tuple[str, ...]:
    even = (
        "never"
        if math.isinf(offer.break_even)
        else "any rate"
        if not offer.break_even
        else as_rate(_rounded(offer.break_even))
    )
    plain = offer.candidate.is_dense and offer.candidate.rule is None and not offer.candidate.halved
    return (
        title,
        as_seconds(offer.step),
        as_seconds(max(0.0, offer.exposed)),
        as_bytes(offer.bytes),
        "" if plain else as_ratio(offer.speedup),
        "" if plain else even,
    )


def _regions(survey: "Survey") -> str:
    clusters = survey.links.clusters()
    return "" if len(clusters) == 1 else f", in {len(clusters)} regions: {', '.join(map(str, clusters))}"


def _rounded(rate: float) -> float:
    """Two figures."""
    return float(f"{8 * rate:.2g}") / 8 if math.isfinite(rate) else rate
