"""Run by test_triton.py in Triton's interpreter: each kernel in Triton against the one in plain torch, bit for bit.

What each loop was given is written to the file that is named. The interpreter takes its time for each program, so that
blocks are few, and no longer than a tile and a bit.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spardl.kernels import triton as ours
from spardl.kernels.torch import TorchKernels
from spardl.kernels.triton import TILE, TritonKernels
from spardl.memory.layout import BlockLayout
from spardl.wire.format import VALUE_FORMATS

POINTERS = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}
launched: dict[str, list[str]] = {}
launch = ours.launch


def noted(loop: Any, grid: tuple[int, ...], *given: Any) -> None:
    kinds = [POINTERS[each.dtype] if isinstance(each, torch.Tensor) else _number(each) for each in given]
    assert launched.setdefault(loop.fn.__name__, kinds) == kinds
    launch(loop, grid, *given)


def _number(value: int | float) -> str:
    return "fp32" if isinstance(value, float) else "i32"


ours.launch = noted

fused, plain = TritonKernels(), TorchKernels()
AWKWARD = [0.0, -0.0, 2.0**-149, -1e-40, 3.4e38, -3.4e38, 1.00390625, 1.01171875, -2.5, 2.5]


def numbers(length: int, seed: int) -> torch.Tensor:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed)) ** 3
    values[: len(AWKWARD)] = torch.tensor(AWKWARD)[:length]
    return values


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype and one.shape == other.shape
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_rounding() -> None:
    for length in (0, 10, TILE + 3):
        values = numbers(length, length)
        for one, other in zip(fused.round_bf16(values), plain.round_bf16(values), strict=True):
            same(one, other)


def check_thresholds() -> None:
    for threshold, limit in ((0.5, 0), (0.5, 7), (0.0, 10**6), (1e9, 3)):
        mine, theirs = numbers(TILE + 9, 1), numbers(TILE + 9, 1)
        assert fused.count_above(mine, threshold) == plain.count_above(theirs, threshold)
        found = fused.take_above(mine, 5, TILE + 8, threshold, limit)
        for one, other in zip(found, plain.take_above(theirs, 5, TILE + 8, threshold, limit), strict=True):
            same(one, other)
        same(mine, theirs)


def check_scattering() -> None:
    mine, theirs = numbers(3000, 2), numbers(3000, 2)
    firsts, counts = np.array([0, 1000, 1700]), np.array([300, 0, 900])
    indices = torch.cat((torch.arange(0, 900, 3), torch.arange(900))).int()
    for kernels, memory in ((fused, mine), (plain, theirs)):
        kernels.scatter_add(memory, firsts, counts, indices, numbers(1200, 3))
    same(mine, theirs)


def check_accumulating() -> None:
    for count, chunk, offset, length in ((1, 4000, 0, 3000), (3, 50, 0, 3000), (4, 64, 333, 2000), (2, 7, 5, 0)):
        layout = BlockLayout(3000, count, chunk)
        for wanted in (np.ones(count, np.bool_), np.arange(count) == 0):
            for last in (1.0, torch.inf):
                both = []
                for kernels in (fused, plain):
                    memory, gradient = numbers(3000, 4) * 1e-3, numbers(length, 5) * 1e-3
                    gradient[-1:] = last
                    place = (layout.starts, layout.chunk, offset)
                    fine = kernels.accumulate(memory, *place, gradient, 0.1, wanted)
                    both.append((memory, gradient, torch.as_tensor(fine)))
                for one, other in zip(*both, strict=True):
                    same(one.flatten(), other.flatten())


def check_momentum_and_weights() -> None:
    for count, chunk, offset, length in ((1, 4000, 0, 3000), (4, 64, 333, 2000), (2, 7, 5, 0)):
        layout, wanted = BlockLayout(3000, count, chunk), np.arange(count) != 1
        place = (layout.starts, layout.chunk, offset)
        for nesterov in (True, False):
            both = []
            for kernels in (fused, plain):
                memory, velocity, updated = numbers(3000, 4), numbers(3000, 5), numbers(3000, 6)
                gradient, weights = numbers(length, 7), numbers(length, 8)
                rule = (0.3, 0.9, 1e-4, 0.7, nesterov)
                fine = kernels.accumulate_momentum(memory, velocity, updated, *place, gradient, weights, *rule, wanted)
                both.append((memory, velocity, updated, gradient, weights, torch.as_tensor(fine)))
                memory, gradient = numbers(3000, 4), numbers(length, 7)
                fine = kernels.differ(memory, *place, weights, gradient, wanted)
                both[-1] += (memory, torch.as_tensor(fine))
            for one, other in zip(*both, strict=True):
                same(one.flatten(), other.flatten())


def check_values() -> None:
    """Codes, scales and what they stand for; blocks without entries, with zeros alone and with ties among them."""
    ties = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])  # of int8, whose step is 1 there
    values = torch.cat((numbers(700, 9) * 1e-6, torch.zeros(30), numbers(TILE, 10), ties))
    counts = np.array([700, 0, 30, TILE, len(ties)])
    for form in (VALUE_FORMATS["int8"], VALUE_FORMATS["fp16"], VALUE_FORMATS["int4"]):
        codes, scales = fused.encode(form, values, counts)
        for one, other in zip((codes, scales), plain.encode(form, values, counts), strict=True):
            same(one, other)
        same(fused.decode(form, codes, scales, counts), plain.decode(form, codes, scales, counts))
    halves, _ = fused.encode(VALUE_FORMATS["fp16"], broken(values), counts)
    same(halves, plain.encode(VALUE_FORMATS["fp16"], values, counts)[0])


def check_largest() -> None:
    """Ties, zeros, blocks of all lengths, and what is not finite."""
    full, whole = TritonKernels(fills=True), TorchKernels(fills=True)
    firsts, stops = np.array([0, 90, 91, 500]), np.array([90, 91, 500, 500 + TILE + 50])
    few, most, other = [20, 1, 0, 30], [90, 1, 409, TILE + 40], [1, 5, 7, 2]
    cases = ((few, torch.round), (few, broken), (most, lambda values: values * (values > 1)), (other, torch.clone))
    for wanted, change in cases:
        budgets, mine = np.array(wanted), change(numbers(2000, 6))
        theirs = mine.clone()
        found = full.take_largest(mine, firsts, stops, budgets)
        for one, other in zip(found, whole.take_largest(theirs, firsts, stops, budgets), strict=True):
            same(torch.as_tensor(one), torch.as_tensor(other))
        same(mine, theirs)


def broken(values: torch.Tensor) -> torch.Tensor:
    values[95], values[1250], values[30] = torch.nan, -torch.inf, torch.inf
    return values


SHAPES = (([5000, 1, 40], [50, 1, 40]), ([2 * TILE], [TILE + 9]), ([10, 2**31 - 1], [0, 3]), ([4], [0]))


def check_fixed_code() -> None:
    """Indices as bytes and back; damaged bytes are judged alike."""
    plain_code, generator = TorchKernels.fixed, torch.Generator().manual_seed(8)
    for lengths, counts in SHAPES:
        blocks = zip(lengths, counts, strict=True)
        chosen = [torch.randperm(min(n, 10**5), generator=generator)[:k].sort().values for n, k in blocks]
        indices, shape = torch.cat(chosen).int(), (np.array(counts), np.array(lengths))
        data = TritonKernels.fixed.write(*shape, indices)
        same(data, plain_code.write(*shape, indices))
        found, fine = TritonKernels.fixed.read(data, *shape)
        same(found, indices)
        assert fine
        for place in torch.randint(max(1, len(data)), (5,), generator=generator).tolist()[: 5 * bool(len(data))]:
            damaged = data.clone()
            damaged[place] ^= 1 << (place % 8)
            mine, theirs = TritonKernels.fixed.read(damaged, *shape), plain_code.read(damaged, *shape)
            assert mine[1] == theirs[1]
            if mine[1]:
                same(mine[0], theirs[0])


check_largest()
check_fixed_code()
check_rounding()
check_thresholds()
check_scattering()
check_accumulating()
check_momentum_and_weights()
check_values()
Path(sys.argv[1]).write_text(json.dumps(launched))
print("the same bits")
