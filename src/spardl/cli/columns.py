"""A table in plain columns, for terminals and files alike. Text that is too wide is folded."""

import textwrap
from collections.abc import Iterator, Sequence

COLUMN_GAP = 2  # columns of space
NARROWEST = 8  # what a column is shrunk to at most


def in_columns(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, right: Sequence[bool]
) -> Iterator[str]:
    """The lines of a table with a ruled head; `right` says which columns end at their right edge."""
    widths = _widths([columns, *rows], width)
    yield from _lines(columns, widths, right)
    yield "-" * (sum(widths) + COLUMN_GAP * (len(widths) - 1))
    for row in rows:
        yield from _lines(row, widths, right)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """What each column needs; where that is more than there is, the widest ones give way."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    too_many = sum(widths) + COLUMN_GAP * (len(widths) - 1) - width
    while too_many > 0 and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
        too_many -= 1
    return widths


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    """One row, in as many lines as its longest cell takes."""
    cells = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)
    ]
    for number in range(max(len(lines) for lines in cells)):
        parts = [lines[number] if number < len(lines) else "" for lines in cells]
        aligned = [
            part.rjust(width) if to_right else part.ljust(width)
            for part, width, to_right in zip(parts, widths, right, strict=True)
        ]
        yield (" " * COLUMN_GAP).join(aligned).rstrip()
