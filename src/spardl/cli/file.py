"""`--config FILE`: options in a TOML file, under their own names. What the command line says as well counts more."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from spardl.cli.parser import Numbers, Parser
from spardl.errors import ConfigError

NOT_IN_A_FILE = ("help", "config")
LISTS = ("methods", "updates")


def add_config_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read options from a TOML file, such as batch-size = 32; those given here count more",
    )


def read_options(path: str, parser: Parser) -> dict[str, Any]:
    """The file's options as the parser of a command would have read them, by their names in the namespace."""
    found: dict[str, Any] = {}
    actions = {
        option.removeprefix("--"): action
        for action in parser._actions
        if action.dest not in NOT_IN_A_FILE
        for option in action.option_strings
        if option.startswith("--") and not option.startswith("--no-")
    }
    for key, value in _load(path).items():
        name = key.replace("_", "-")
        if name not in actions:
            near = difflib.get_close_matches(name, actions, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path} sets {key!r}, an option that `{parser.prog}` does not have.{hint}")
        action = actions[name]
        if action.dest in found:
            raise ConfigError(f"{path} sets {name} twice, under two spellings; leave one.")
        try:
            found[action.dest] = _value_of(action, value)
        except (argparse.ArgumentTypeError, ConfigError) as error:
            raise ConfigError(f"{path}: {key} = {_shown(value)}: {str(error).rstrip('.')}.") from error
    return found


def _load(path: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; options stand by themselves.") from error


def _value_of(action: argparse.Action, value: Any) -> Any:
    """Check the kind, and let the option's own type check the rest."""
    if isinstance(value, dict):
        raise ConfigError("options stand by themselves, not in a table")
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError("it is true or false")
        return value
    if value is True and action.nargs == "?":
        return action.const
    if isinstance(value, list):
        if not (isinstance(action.type, Numbers) or action.dest in LISTS):
            raise ConfigError("it is one value, not a list")
        value = ",".join(str(item) for item in value)
    elif isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError("it is a number or a text")
    elif isinstance(value, str) and callable(action.type) and _is_number(value):
        raise ConfigError("it is a number: write it without quotes")
    elif not isinstance(value, str) and action.type is None:
        raise ConfigError("it is a text: write it in quotes")
    return action.type(str(value)) if callable(action.type) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
