"""`--update` and the settings of local updates: as options, and what they come to."""

import argparse
from dataclasses import dataclass
from typing import Any

from spardl.choices import check_choice, declared, setting
from spardl.cli.options import add_setting, type_of
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.update import GRADIENTS, NAMES, RULES, LocalUpdates, check_beside, resolve

OWNER = "local updates"


@dataclass(frozen=True)
class UpdateRule:
    """The keyword of `attach` that says what is synchronised."""

    update: str = setting(
        GRADIENTS,
        "what ranks exchange: gradients, or weights that each of them steps by itself (local; the others are"
        " published ways of that, with settings of their own)",
        choices=RULES,
    )


(UPDATE,) = declared(UpdateRule)


def add_update_options(parser: argparse.ArgumentParser) -> None:
    """What is synchronised, and, for local updates, when and how."""
    group = parser.add_argument_group("update rule")
    add_setting(group, UPDATE)
    _add_local_settings(group)


def add_several_update_options(parser: argparse.ArgumentParser) -> None:
    """The same, for a command that tries several rules."""
    group = parser.add_argument_group("update rules")
    group.add_argument(
        "--updates",
        "--update",
        metavar="NAMES",
        default=GRADIENTS,
        help=f"run each sparse method under each of these rules, of {', '.join(RULES)}, separated by commas; a rule"
        " may have settings of its own, as local:delay=1 (default: %(default)s)",
    )
    _add_local_settings(group)


def _add_local_settings(group: argparse._ArgumentGroup) -> None:
    for field in declared(LocalUpdates):
        add_setting(group, field, of=OWNER)


def chosen_updates(options: argparse.Namespace) -> list[str]:
    """The rules that `--updates` names, each once."""
    names = [name.strip() for name in options.updates.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--updates names no rule; choose from {', '.join(RULES)}.")
    for name in names:
        check_choice("update", name.partition(":")[0], RULES)
    return list(dict.fromkeys(names))


def chosen_update(
    options: argparse.Namespace, update: str, config: SyncConfig, *, others: bool = False
) -> tuple[LocalUpdates | None, SyncConfig]:
    """The rule of this name with the settings that were given, None for gradients, and the configuration under it.

    Settings in the name itself, as in local:delay=1, count more than options. A published way brings settings along
    that count unless others were given. With `others`, settings of local updates may be meant for other rules of the
    same command.

    Raises:
        ConfigError: no such rule, or settings that do not belong to it.
    """
    name, _, own = update.partition(":")
    settings = {} if others and name == GRADIENTS else given_local_settings(options)
    rule, brought = resolve(name, settings | own_settings(update, own))
    given = options.given | ({"density"} if options.given & {"density_warmup", "densities"} else set())
    changes = {name: value for name, value in brought.items() if name not in given}
    found = configure(config, changes)
    if rule is not None:
        check_beside(found)
    return rule, found


def own_settings(update: str, text: str) -> dict[str, Any]:
    """Settings that stand behind a rule's name: delay=1:every=5."""
    fields = {field.name.replace("_", "-"): field for field in declared(LocalUpdates)}
    found = {}
    for part in filter(None, text.split(":")):
        name, _, value = part.partition("=")
        check_choice(f"setting in {update!r}", name, tuple(fields))
        try:
            found[fields[name].name] = type_of(fields[name])(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{update!r}: {error}.") from None
    return found


def given_local_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
