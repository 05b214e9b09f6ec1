"""How settings are declared and checked: one place that the command line, the documents and the errors read from."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spardl.errors import ConfigError


def setting(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] = (),
    check: Callable[[str, Any], None] | None = None,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a settings dataclass.

    Args:
        default: what it is if nobody says anything.
        text: one line for people, on the command line and in the documents.
        choices: the words that it may be.
        check: called with the field's name and value; raises `ConfigError` for what cannot work.
        parse: from the command line's text; default: the type of `default`.
        metavar: what the command line's help calls its value.
    """
    metadata = {"text": text, "choices": tuple(choices), "check": check, "parse": parse, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(given: Any) -> None:
    """Raise `ConfigError` for the first field of a settings object that cannot work."""
    for each in declared(type(given)):
        value, check = getattr(given, each.name), each.metadata["check"]
        if each.metadata["choices"] and (check is None or isinstance(value, str)):
            check_choice(each.name, value, each.metadata["choices"])
        elif check is not None:
            check(each.name, value)


def declared(settings: type) -> Iterator["dataclasses.Field[Any]"]:
    """The fields of a settings class that were made by `setting`."""
    return (each for each in dataclasses.fields(settings) if "text" in each.metadata)


def check_choice(name: str, given: object, choices: Sequence[str], hint: str = "") -> None:
    """Raise `ConfigError` unless `given` is one of `choices`, with a guess at what was meant."""
    if given in choices:
        return
    begun = [choice for choice in choices if given and choice.startswith(str(given))]
    near = begun or difflib.get_close_matches(str(given), choices, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    listing = ", ".join(choices) + (f" ({hint})" if hint else "")
    raise ConfigError(f"there is no {name} {given!r}.{guess} Choose from {listing}.")


def is_number(given: object) -> bool:
    """A finite real number of any kind, numpy's included, that a float can hold."""
    try:
        return isinstance(given, numbers.Real) and math.isfinite(float(given))
    except OverflowError:
        return False


def is_count(given: object, least: int = 0) -> bool:
    """A whole number of `least` or more, of any kind."""
    return isinstance(given, numbers.Integral) and int(given) >= least


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
