"""Value formats that only tests have, narrower than those of the package: whoever adds one needs no more than this."""

from dataclasses import dataclass

import numpy as np
import torch

from spardl.wire.format import FloatFormat, ScaledFormat, ValueFormat

INT4 = ScaledFormat("int4", 5, bits=4)
INT2 = ScaledFormat("int2", 6, bits=2)
FP8 = FloatFormat("fp8", 7, bits=8, codes="float8_e5m2", not_finite=0x7C)


@dataclass(frozen=True)
class Signs(ValueFormat):
    """One bit per value, and the mean magnitude of each block."""

    def encode(self, values, counts):
        blocks = values.split(counts.tolist())
        means = [block.abs().mean() if len(block) else torch.tensor(0.0) for block in blocks]
        return (values > 0).to(torch.uint8), torch.stack(means) if means else values[:0]

    def decode(self, codes, scales, counts):
        return (2 * codes.float() - 1) * scales[torch.from_numpy(np.repeat(np.arange(len(counts)), counts))]


SIGNS = Signs("signs", 7, bits=1, codes="uint8", per_scale=1 << 32)
NARROW = (INT4, INT2, SIGNS, FP8)
