"""`--update` and the settings of local updates: as options, and what they come to."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from spardl.choices import declared, setting
from spardl.cli.options import add_setting
from spardl.config import SyncConfig
from spardl.update import GRADIENTS, NAMES, RULES, LocalUpdates, resolve

OWNER = "local updates"


@dataclass(frozen=True)
class UpdateRule:
    """The keyword of `attach` that says what is synchronised."""

    update: str = setting(
        GRADIENTS,
        "what ranks exchange: gradients, or weights that each of them steps by itself (local; local-sgd and diloco are"
        " published ways of that, with settings of their own)",
        choices=RULES,
    )


(UPDATE,) = declared(UpdateRule)


def add_update_options(parser: argparse.ArgumentParser) -> None:
    """What is synchronised, and, for local updates, when and how."""
    group = parser.add_argument_group("update rule")
    add_setting(group, UPDATE)
    _add_local_settings(group)


def _add_local_settings(group: argparse._ArgumentGroup) -> None:
    for field in declared(LocalUpdates):
        add_setting(group, field, of=OWNER)


def chosen_update(
    options: argparse.Namespace, update: str, config: SyncConfig
) -> tuple[LocalUpdates | None, SyncConfig]:
    """The rule of this name with the settings that were given, None for gradients, and the configuration under it.

    A published way brings settings along that count unless others were given.

    Raises:
        ConfigError: no such rule, or settings that do not belong to it.
    """
    rule, brought = resolve(update, given_local_settings(options))
    given = options.given | ({"density"} if "density_warmup" in options.given else set())
    changes = {name: value for name, value in brought.items() if name not in given}
    return rule, dataclasses.replace(config, **changes) if changes else config


def given_local_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
