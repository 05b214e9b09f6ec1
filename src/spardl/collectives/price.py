"""What a method costs, as a formula that is printed, computed and tested."""

import ast
import math
from dataclasses import dataclass

_FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "log2": math.log2, "min": min, "max": max}


@dataclass(frozen=True)
class Price:
    """A number that depends on P workers, d teams, n elements and k entries, or a range of such numbers.

    `least` and `most` are Python expressions in P, d, n and k with ceil, floor, log2, min and max.
    """

    least: str
    most: str = ""

    def __str__(self) -> str:
        least, most = (_readable(text) for text in (self.least, self.most))
        return f"{least} to {most}" if self.most else least

    def range(self, *, P: int, d: int = 1, n: int = 0, k: int = 0) -> tuple[float, float]:
        """The least and the most that it can be."""
        least = _evaluate(self.least, P=P, d=d, n=n, k=k)
        return least, _evaluate(self.most, P=P, d=d, n=n, k=k) if self.most else least


def _evaluate(text: str, **names: int) -> float:
    """The value of an expression of this package's own, without anything but arithmetic."""
    return float(
        eval(compile(ast.parse(text, mode="eval"), text, "eval"), {"__builtins__": {}}, {**_FUNCTIONS, **names})
    )


def _readable(text: str) -> str:
    """A formula as people write it: without stars, and log2 P without brackets."""
    return (
        text.replace("*", " ")
        .replace("log2(P)", "log2 P")
        .replace("log2(d)", "log2 d")
        .replace("log2(P/d)", "log2 P/d")
    )
