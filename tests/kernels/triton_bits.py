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

from spardl.kernels.api import CodedEntries
from spardl.kernels.torch import TorchKernels
from spardl.kernels.triton import TILE, TritonKernels, launching
from spardl.memory.layout import BlockLayout
from spardl.wire import format as wire
from spardl.wire.format import VALUE_FORMATS, FrameFormat

POINTERS = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
launched: dict[str, list[str]] = {}
ones: dict[str, set[int]] = {}  # of each loop, which whole numbers were 1: Triton compiles them into the loop then
launch = launching.launch


def noted(loop: Any, grid: tuple[int, ...], *given: Any) -> None:
    kinds = [POINTERS[each.dtype] if isinstance(each, torch.Tensor) else _number(each) for each in given]
    name = loop.fn.__name__
    assert launched.setdefault(name, kinds) == kinds
    ones.setdefault(name, set()).update(at for at, each in enumerate(given) if type(each) is int and each == 1)
    launch(loop, grid, *given)


def _number(value: int | float) -> str:
    return "fp32" if isinstance(value, float) else "i32"


launching.launch = noted

fused, plain = TritonKernels(), TorchKernels()
full, whole = TritonKernels(fills=True), TorchKernels(fills=True)
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
    for form in (VALUE_FORMATS["int8"], VALUE_FORMATS["fp16"]):
        codes, scales = fused.encode(form, values, counts)
        for one, other in zip((codes, scales), plain.encode(form, values, counts), strict=True):
            same(one, other)
        same(fused.decode(form, codes, scales, counts), plain.decode(form, codes, scales, counts))
    halves, _ = fused.encode(VALUE_FORMATS["fp16"], broken(values), counts)
    same(halves, plain.encode(VALUE_FORMATS["fp16"], values, counts)[0])


def check_largest() -> None:
    """Ties, zeros, blocks of all lengths, and what is not finite."""
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


def check_levels() -> None:
    """Values in 4 bits and fewer: blocks of several scales, one short of them and one more, alike, empty, and tiny;
    amounts and levels that lie halfway between two; and in bytes."""
    many = VALUE_FORMATS["int4"].per_scale
    halves = torch.arange(-360.0, 361.0) / 2  # a unit is 1, from 0 to 180
    alike, tiny = torch.full((9,), -3.3), torch.tensor([1e-45, -1e-40, 0.0, 2e-38, 3e-45, -0.0])
    huge = torch.tensor([3.4e38, -3.4e38, 1.0, 3.39e38])
    down, up = torch.full((3,), 1.00390625), torch.full((3,), 1.01171875)  # halfway between two bf16
    middle = torch.cat((torch.zeros(600), torch.full((700,), 128.0), torch.tensor([180.0, 64.0])))  # of two levels
    parts = (numbers(2 * many + 1, 11), halves, tiny[:0], alike, tiny, tiny[:1], huge, down, up, middle)
    parts += (numbers(many - 1, 12) * 1e-6,)
    values, counts = torch.cat(parts), np.array([len(part) for part in parts])
    for name in ("int4", "int2", "int1"):
        form = VALUE_FORMATS[name]
        codes, scales = fused.encode(form, values, counts)
        for one, other in zip((codes, scales), plain.encode(form, values, counts), strict=True):
            same(one, other)
        same(fused.decode(form, codes, scales, counts), plain.decode(form, codes, scales, counts))
        for count in (len(codes), len(codes) - 1, 1, 0):
            data = fused.pack_codes(codes[:count], form.bits)
            same(data, plain.pack_codes(codes[:count], form.bits))
            same(fused.unpack_codes(data, count, form.bits, form.dtype), codes[:count])
        unsigned = fused.unpack_codes(data, 0, form.bits, torch.uint8)
        assert unsigned.dtype == torch.uint8
        for odd in (torch.nan, torch.inf, -torch.inf):
            damaged = values.clone()
            damaged[2 * many], damaged[-1] = odd, odd
            mine, theirs = (each.encode(form, damaged, counts)[1].isfinite() for each in (fused, plain))
            assert torch.equal(mine, theirs) and mine.logical_not().sum() == 2


def check_bins() -> None:
    """Values below the first bin, above the last, and on both edges of one."""
    values = torch.cat((numbers(TILE + 9, 13), torch.tensor([1.0, -2.0, 4.0, 3.9999998])))
    for first, shift, bins in ((127 << 3, 20, 16), (0, 23, 256), (1000, 21, 1)):
        same(fused.count_bins(values, first, shift, bins), plain.count_bins(values, first, shift, bins))
    same(fused.count_bins(values[:0], 3, 20, 4), plain.count_bins(values[:0], 3, 20, 4))


def check_cuts() -> None:
    """Ties across the end of a tile, zeros, and as few or many as there are."""
    values = torch.cat((numbers(TILE - 2, 14).round(), torch.ones(9), -torch.ones(40), torch.zeros(30)))
    indices = (3 * torch.arange(len(values))).int()
    above = int((values.abs() > 1).sum())
    for budget in (0, 1, above, above + 1, above + 60, len(values) - 45, len(values) - 1):
        for mine, theirs in ((full, whole), (fused, plain)):
            same(mine.keep_largest(values, budget), theirs.keep_largest(values, budget))
            found, expected = (each.part_largest(indices, values, budget) for each in (mine, theirs))
            for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
                same(one, other)


def check_sums() -> None:
    """Pieces that overlap in all, some or no places, cancel, are empty, reach across a tile, or fill the block."""
    generator = torch.Generator().manual_seed(15)
    shapes = ((5000, 900, 700), (TILE + 30, TILE + 3, 40), (40, 40, 40), (40, 30, 25), (9, 0, 4), (9, 4, 0), (9, 0, 0))
    for length, lefts, rights in (*shapes, (2**31 - 1, 50, 60)):
        reach = min(length, 10**4)
        left, right = (torch.randperm(reach, generator=generator)[:n].sort().values for n in (lefts, rights))
        left, right = left + (length - reach), right + (length - reach)
        pieces = (left.int(), numbers(lefts, 16).round(), right.int(), numbers(rights, 17).round())
        for mine, theirs in ((full, whole), (fused, plain)):
            for one, other in zip(mine.merge(*pieces, length), theirs.merge(*pieces, length), strict=True):
                same(one, other)


def check_frames() -> None:
    """The same bytes, and of frames that are damaged, poisoned or too short the same verdicts and entries."""
    lengths, counts = np.array([300, 1, 0, 64, 900]), np.array([20, 1, 0, 64, 33])
    generator, verdicts = torch.Generator().manual_seed(18), set()
    chosen = [torch.randperm(n, generator=generator)[:k].sort().values for n, k in zip(lengths, counts, strict=True)]
    places, values = torch.cat(chosen).int(), numbers(int(counts.sum()), 19).clamp(-9, 9)
    for name in ("fp32", "bf16", "int4", "none"):
        for indices in ("fixed", "raw", "rice"):
            form = FrameFormat(VALUE_FORMATS[name], indices)
            entries = CodedEntries(counts, places, *whole.encode(form.values, values, counts))
            frame = full.write_frame(form, False, lengths, counts, entries)
            same(frame, whole.write_frame(form, False, lengths, counts, entries))
            poisoned = full.write_frame(form, torch.tensor(True), lengths, counts, entries)
            same(poisoned, whole.write_frame(form, torch.tensor(True), lengths, counts, entries))
            cases = [frame, poisoned, frame[:-1], frame[:40], torch.cat((frame, frame[:3])), frame.clone()]
            cases[-1][4] -= 1  # it says that it is shorter by a byte
            for place in [*range(14), *torch.randint(13, len(frame), (5,), generator=generator).tolist()]:
                cases.append(frame.clone())
                cases[-1][place] ^= int(torch.randint(1, 256, (1,), generator=generator))
            cases += [_infinite(frame, at) for at in (13, 14, 15, 16, 17)]
            for case in cases if indices == "fixed" else cases[:6]:
                both = [each.read_frame(case, form, lengths, counts, full=True) for each in (full, whole)]
                (mine, found), (theirs, expected) = both
                assert mine == theirs and mine.dtype == theirs.dtype, (name, indices, mine, theirs)
                verdicts.add(int(mine))
                for one, other in zip(found[1:], expected[1:], strict=True):
                    same(one, other)
    assert verdicts == {0, wire.NOT_FINITE, wire.ASTRAY, wire.TOO_SHORT, wire.OTHER_COUNTS, wire.POISONED, wire.FOREIGN}


def _infinite(frame: torch.Tensor, at: int) -> torch.Tensor:
    """With four bytes of which float32, bf16 and scales make something that is not finite, if they begin there."""
    damaged = frame.clone()
    damaged[at : at + 4] = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8)
    return damaged


SHAPES = (([5000, 1, 40], [50, 1, 40]), ([2 * TILE], [TILE + 9]), ([10, 2**31 - 1], [0, 3]), ([4], [0]))


def check_fixed_code() -> None:
    """Indices as bytes and back; damaged bytes are judged alike."""
    mine_code, plain_code, generator = TritonKernels.passes, TorchKernels.passes, torch.Generator().manual_seed(8)
    for lengths, counts in SHAPES:
        blocks = zip(lengths, counts, strict=True)
        chosen = [torch.randperm(min(n, 10**5), generator=generator)[:k].sort().values for n, k in blocks]
        indices, shape = torch.cat(chosen).int(), (np.array(counts), np.array(lengths))
        data = mine_code.write_fixed(*shape, indices)
        same(data, plain_code.write_fixed(*shape, indices))
        found, fine = mine_code.read_fixed(data, *shape)
        same(found, indices)
        assert fine
        for place in torch.randint(max(1, len(data)), (5,), generator=generator).tolist()[: 5 * bool(len(data))]:
            damaged = data.clone()
            damaged[place] ^= 1 << (place % 8)
            mine, theirs = mine_code.read_fixed(damaged, *shape), plain_code.read_fixed(damaged, *shape)
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
check_levels()
check_bins()
check_cuts()
check_sums()
check_frames()
Path(sys.argv[1]).write_text(json.dumps({name: (kinds, sorted(ones[name])) for name, kinds in launched.items()}))
print("the same bits")
