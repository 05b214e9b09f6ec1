"""Quantities as people write them: 50us, 2ms, 1gbit, 125MB."""

import math
import re

from spardl.errors import ConfigError

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z/]*)\s*", re.IGNORECASE)


def seconds(text: str) -> float:
    """`50us` is 5e-05. A unit is required, except for 0."""
    number, unit = _split(text, example="50us, 2ms or 1s")
    if unit in SECONDS:
        return number * SECONDS[unit]
    if number == 0 and not unit:
        return 0.0
    raise ConfigError(f"{text!r} is not a time; write a number and one of {', '.join(SECONDS)}, such as 50us.")


def bytes_per_second(text: str) -> float:
    """`1gbit` is 1.25e8. Bits are spelt out, bytes are a capital B; `inf` is a network that costs nothing per byte."""
    if text.strip().lower() == "inf":
        return math.inf
    number, unit = _split(text, example="1gbit, 100mbit or 125MB")
    rate = number * _bytes_of(unit.removesuffix("/s"), text)
    if rate <= 0:
        raise ConfigError(f"a bandwidth of {text} moves nothing; give more than 0, or inf.")
    return rate


def _bytes_of(unit: str, text: str) -> float:
    if unit.lower().endswith("bit"):
        prefix, share = unit[:-3].lower(), 1 / 8
    elif unit.endswith("B"):
        prefix, share = unit[:-1].lower(), 1.0
    else:
        prefix, share = "?", 0.0
    if prefix not in PREFIXES:
        raise ConfigError(f"{text!r} is not a bandwidth; write bits as 100mbit or 1gbit, bytes as 125MB (per second).")
    return PREFIXES[prefix] * share


def _split(text: str, example: str) -> tuple[float, str]:
    match = NUMBER_AND_UNIT.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r} is not a number with a unit, such as {example}.")
    return float(match[1]), match[2]
