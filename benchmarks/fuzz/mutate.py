"""Bytes that are almost right: a sample, altered in a few places. All is decided by the random generator given."""

import random
import struct
from collections.abc import Callable, Sequence

# Numbers at which programs go wrong, as they stand in files and frames.
EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FC00000, 0x7F800000)

LONGEST = 1 << 16  # bytes of a case

# What stands in texts that programs read, and between what.
WORDS = (
    b"", b"0", b"-1", b"1e999", b"nan", b"inf", b"null", b"true", b'"', b"'", b"[", b"]", b"{", b"}", b"=", b":", b",",
    b"\n", b"\r", b"\0", b"\xff", b"\\u0000", b"#", b"[[", b'"""', b"9" * 400, b"[" * 3000, b"{\"a\":" * 3000, b"1_0",
    b"0x1f", b"1979-05-27", b"\xed\xa0\x80", b"..", b"/",
)  # fmt: skip


def mutated(sample: bytes, others: Sequence[bytes], chance: random.Random, *, text: bool = False) -> bytes:
    """The sample with one to four alterations; parts may come from `others`."""
    data = bytearray(sample)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        chance.choice(_OF_TEXTS if text else _OF_BYTES)(data, others, chance)
    return bytes(data[:LONGEST])


def _flip(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _set_number(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    """One of 1, 2, 4 or 8 bytes, in either order of bytes."""
    size, kind = chance.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
    if len(data) >= size:
        at = chance.randrange(len(data) - size + 1)
        value = chance.choice(EDGES) & ((1 << 8 * size) - 1)
        data[at : at + size] = struct.pack(chance.choice("<>") + kind, value)


def _cut(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _drop(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    first, last = _stretch(data, chance)
    del data[first:last]


def _repeat(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    first, last = _stretch(data, chance)
    data[last:last] = data[first:last] * chance.choice((1, 1, 2, 50))


def _append(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    data += chance.randbytes(chance.choice((1, 2, 7, 64)))


def _splice(data: bytearray, others: Sequence[bytes], chance: random.Random) -> None:
    other = chance.choice(others)
    at, size = chance.randrange(len(other) + 1), chance.choice((1, 4, 16, 200))
    first, last = _stretch(data, chance)
    data[first:last] = other[at : at + size]


def _say(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(WORDS)


def _say_instead(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    first, last = _stretch(data, chance)
    data[first:last] = chance.choice(WORDS)


def _swap_lines(data: bytearray, _: Sequence[bytes], chance: random.Random) -> None:
    lines = bytes(data).split(b"\n")
    chance.shuffle(lines)
    data[:] = b"\n".join(lines)


def _stretch(data: bytearray, chance: random.Random) -> tuple[int, int]:
    first = chance.randrange(len(data) + 1)
    return first, min(len(data), first + chance.choice((1, 2, 4, 8, 30, 300)))


_Alter = Callable[[bytearray, Sequence[bytes], random.Random], None]
_OF_BYTES: tuple[_Alter, ...] = (_flip, _flip, _set, _set_number, _set_number, _cut, _drop, _repeat, _append, _splice)
_OF_TEXTS: tuple[_Alter, ...] = (*_OF_BYTES, _say, _say, _say_instead, _say_instead, _swap_lines)
