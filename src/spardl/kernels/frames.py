"""What the loops that write and read frames have in common with whoever calls them. wire/frame.py has the format."""

import struct
from typing import NamedTuple

import torch

VERSION = 1
HEADER = struct.Struct("<BBHI")  # version, flags, number of blocks, length
POISONED_FLAG = 16

# What is wrong with a frame. One that is fine has 0 or more entries.
TOO_MANY = -1  # a block has more entries than it may
TOO_SHORT = -2  # its values do not fit into it
NOT_FINITE = -3  # a value is infinite or NaN
ASTRAY = -4  # indices run out, descend, or leave their block
FOREIGN = -5  # the header is of another frame than the expected one
POISONED = -6  # nothing: its sender has no finite gradient


class Form(NamedTuple):
    """How entries are written.

    kind        type of the codes
    value_bytes of one code; 0 if there are only indices
    exponents   the upper bits of a code that are all set if it is not finite; 0 for codes that are always finite
    scaled      each block has a scale
    raw         indices are written as they are
    """

    flags: int
    kind: torch.dtype
    value_bytes: int
    exponents: int
    scaled: bool
    raw: bool
