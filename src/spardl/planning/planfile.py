"""A plan as a file: what `spardl plan` found, and `attach(plan=...)` and `spardl train --plan` take up. No torch here.

TOML, or JSON if its name ends so. It says for which model and how many workers it was made, and is refused elsewhere.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.update import GRADIENTS, LocalUpdates, resolve

VERSION = 1
HINT = "make one with `spardl plan --out`"


@dataclass(frozen=True)
class PlanFile:
    """Settings under the names that `attach` has for them, and whom they were made for.

    workers    how many
    elements   of the model
    digest     of its parameters' names and sizes
    predicted  what the plan should bring; for people
    """

    workers: int
    elements: int
    digest: str
    update: str
    settings: dict[str, Any]
    predicted: dict[str, Any] = field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        """Raises `ConfigError` if that cannot be written."""
        tables = {
            "made_for": {"workers": self.workers, "elements": self.elements, "model": self.digest},
            "settings": {"update": self.update, **self.settings},
            "predicted": self.predicted,
        }
        as_json = Path(path).suffix == ".json"
        text = json.dumps({"version": VERSION, **tables}, indent=1) + "\n" if as_json else _toml(tables)
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the plan {path}: {error.strerror}.") from error

    @classmethod
    def read(cls, path: str | Path) -> "PlanFile":
        """A plan from a file, checked whole.

        Raises:
            ConfigError: it cannot be read, or is no plan.
        """
        given = _load(path)
        if given.get("version") != VERSION:
            raise ConfigError(f"{path} is no plan of version {VERSION}; {HINT}.")
        made, settings = _table(path, given, "made_for"), _table(path, given, "settings")
        update = settings.pop("update", GRADIENTS)
        if update not in (GRADIENTS, "local") or not all(_is_plain(value) for value in settings.values()):
            raise ConfigError(f"{path} has settings that no plan has; {HINT}.")
        _check(path, update, settings)
        return cls(
            workers=_count(path, made, "workers"),
            elements=_count(path, made, "elements"),
            digest=str(made.get("model", "")),
            update=update,
            settings=settings,
            predicted=_table(path, given, "predicted") if "predicted" in given else {},
        )

    def check_for(self, workers: int, sizes: Mapping[str, int]) -> None:
        """Raise `ConfigError` unless it was made for so many workers and these parameters, by name and size."""
        self.check_workers(workers)
        elements = sum(sizes.values())
        if elements != self.elements:
            raise ConfigError(
                f"this plan was made for a model of {self.elements:,} parameters, and this one has {elements:,}; plan"
                " again with this model."
            )
        if digest_of(sizes) != self.digest:
            raise ConfigError(
                "this plan was made for another model: it has as many parameters, but other names or shapes of them;"
                " plan again with this model."
            )

    def check_workers(self, workers: int) -> None:
        """Raise `ConfigError` unless it was made for so many."""
        if workers != self.workers:
            raise ConfigError(
                f"this plan was made for {self.workers} workers, and there are {workers}; plan again with {workers}."
            )

    def config(self) -> tuple[LocalUpdates | None, SyncConfig]:
        """The update rule, None for gradients, and the configuration."""
        rule, others = resolve(self.update, self.settings)
        return rule, SyncConfig(**others)


def digest_of(sizes: Mapping[str, int]) -> str:
    """Parameters' names and sizes in 16 characters."""
    text = json.dumps(sorted(sizes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(path: str | Path, update: str, settings: Mapping[str, Any]) -> None:
    try:
        _, others = resolve(update, settings)
        SyncConfig(**others)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"the plan {path} has settings that cannot work: {error}") from error


def _load(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror}; {HINT}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no plan, nor any text; {HINT}.") from error
    try:
        found = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"the plan {path} is damaged: {error}; {HINT}.") from error
    except RecursionError as error:
        raise ConfigError(f"the plan {path} is damaged: it is nested too deeply; {HINT}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no plan; {HINT}.")
    return found


def _table(path: str | Path, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = given.get(name)
    if not isinstance(found, dict):
        raise ConfigError(f"the plan {path} has no part {name!r}; {HINT}.")
    return dict(found)


def _count(path: str | Path, given: Mapping[str, Any], name: str) -> int:
    found = given.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"the plan {path} says {found!r} for {name}, where a number of 1 or more stands; {HINT}.")
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list)


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# made by `spardl plan`, for attach(plan=...) and `spardl train --plan`", f"version = {VERSION}"]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """JSON writes numbers, texts, truth and lists as TOML does."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
