"""Value formats that only tests have: whoever adds one needs no more than this."""

from spardl.wire.format import FloatFormat, ScaledFormat

GRID4 = ScaledFormat("grid4", 5, bits=4)
GRID2 = ScaledFormat("grid2", 6, bits=2)
FP8 = FloatFormat("fp8", 7, bits=8, codes="float8_e5m2", not_finite=0x7C)
NARROW = (GRID4, GRID2, FP8)
