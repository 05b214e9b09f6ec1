"""Every setting on one line: what `spardl methods --settings` prints, and the table in docs/settings.md.

Names, defaults, choices and texts are those that the settings declare (`choices.setting`), so nobody writes them twice.
A test compares that page with `markdown`.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from spardl.choices import declared
from spardl.cli.options import shown
from spardl.cli.updates import OWNER, UPDATE
from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig, options_of
from spardl.update import LocalUpdates


class Row(NamedTuple):
    """One setting as people read it. `methods` are those that have it; or it is one of local updates."""

    setting: str
    default: str
    choices: str
    methods: str
    text: str


def rows(methods: Iterable[str] = METHODS) -> Iterator[Row]:
    """The settings that all methods share, the options that only some of these methods have, and the update rule."""
    for field in declared(SyncConfig):
        yield _row(field)
    owners: dict[str, list[str]] = {}
    for method in methods:
        for name in options_of(method):
            owners.setdefault(name, []).append(method)
    for name, having in owners.items():
        yield _row(options_of(having[0])[name], ", ".join(having))
    yield _row(UPDATE)
    for field in declared(LocalUpdates):
        yield _row(field, OWNER)


def markdown(methods: Iterable[str] = METHODS) -> str:
    """The table of docs/settings.md."""
    lines = ["| setting | default | choices | methods | |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{setting}` | {' | '.join(others)} |" for setting, *others in rows(methods)]
    return "\n".join(lines)


def _row(field: "dataclasses.Field[Any]", methods: str = "all") -> Row:
    default, meta = field.default, field.metadata
    value = "none" if default is None else shown(default)
    choices = ", ".join(choice for choice in meta["choices"] if len(choice) > 1)  # without short forms
    return Row(field.name, value, choices, methods, meta["text"])
