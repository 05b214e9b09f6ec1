"""What the loops that write and read frames have in common with whoever calls them. wire/frame.py has the format."""

import struct

HEADER = struct.Struct("<BBHI")  # version, flags, number of blocks, length

# What is wrong with a frame. One that is fine has 0 or more entries.
TOO_MANY = -1  # a block has more entries than it may
TOO_SHORT = -2  # its values do not fit into it
NOT_FINITE = -3  # a value is infinite or NaN
ASTRAY = -4  # indices run out, descend, or leave their block
