"""The hot loops on one thread, against the least that they could take: one addition in place over the same memory.

    python -m benchmarks.kernels --elements 14728266 1000000

Through a rank's memory and the codec, as methods call them. All take turns, each on a fresh gradient; what a step took
out is gone from memory, so after a few warm-up steps residuals look as they do in training.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor

from spardl.bench.run import quartiles
from spardl.cli.output import as_percent, as_seconds, table
from spardl.kernels import for_device
from spardl.memory.buffer import Buffer
from spardl.memory.layout import BlockLayout, entries
from spardl.memory.memory import Memory
from spardl.memory.transaction import Transaction
from spardl.sparse import Array, SparseBlocks
from spardl.wire.frame import Codec

ADD = "numpy.add(acc, g, out=acc)"
READ = "read (numpy max)"
LARGEST = "add + take largest, one block"
DEALT = "add + take largest, 4 blocks"
ABOVE = "add + take above a threshold"
PACK = "round and pack"
UNPACK = "unpack and decode"
COPY = "copy of as many bytes"

# At most so many times numpy.add.
TARGETS = {LARGEST: 5.0, DEALT: 5.0, ABOVE: 2.5}
BLOCKS = 4
WARM_UP = 5

Timed = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, nargs="+", default=[14_728_266])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--values", default="bf16", help="format of values on the wire; default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for elements in map(int, options.elements):
        selection = measured(Selection(elements, options.density), options.repetitions)
        coding = measured(Coding(elements, options.density, options.values), options.repetitions)
        records = [*selection_records(selection, elements, options), *coding_records(coding, elements, options)]
        show(records)
        found += records
    if options.json:
        Path(options.json).write_text("".join(json.dumps(record) + "\n" for record in found))


def measured(turns: "Selection | Coding", repetitions: int) -> dict[str, list[float]]:
    """Seconds of each way, which take turns. `turns.next` prepares one and gives what is to be timed."""
    seconds: dict[str, list[float]] = {name: [] for name in turns.names}
    for turn in range(-WARM_UP, repetitions):
        for name in turns.names:
            once = turns.next(name)
            started = time.perf_counter()
            once()
            elapsed = time.perf_counter() - started
            turns.done(name)
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


class Selection:
    """Accumulating and selecting: each way has its own memory."""

    names = (ADD, READ, LARGEST, DEALT, ABOVE)

    def __init__(self, elements: int, density: float) -> None:
        self._pool = torch.randn(elements, generator=torch.Generator().manual_seed(0))
        self._gradient = torch.empty(elements)
        self._shift = np.random.default_rng(0)
        self._sum = np.zeros(elements, np.float32)
        self._count = entries(density, elements)
        one, dealt = BlockLayout.contiguous(elements, 1), BlockLayout.interleaved(elements, BLOCKS)
        self._stores = {LARGEST: Store(one), DEALT: Store(dealt), ABOVE: Store(one)}
        self._budgets = {LARGEST: np.array([self._count]), DEALT: dealt.budgets(density)}

    def next(self, name: str) -> Timed:
        gradient = self._fresh()
        if name == ADD:
            return lambda: np.add(self._sum, gradient.numpy(), out=self._sum)
        if name == READ:
            return self._sum.max
        store = self._stores[name]
        if name == ABOVE:
            threshold, limit = self._threshold(store, gradient), 2 * self._count
            return store.after_adding(gradient, lambda: store.memory.take_above_of_all(threshold, limit))
        budgets = self._budgets[name]
        ids = np.arange(len(budgets))
        return store.after_adding(gradient, lambda: store.memory.take_largest(ids, budgets))

    def done(self, name: str) -> None:
        if name in self._stores:
            self._stores[name].transaction.commit()

    def _fresh(self) -> Tensor:
        """A gradient that was not there before: the pool, from another place on."""
        first = int(self._shift.integers(self._pool.numel()))
        torch.cat((self._pool[first:], self._pool[:first]), out=self._gradient)
        return self._gradient

    def _threshold(self, store: "Store", gradient: Tensor) -> float:
        """That of the count-th magnitude: what a controller that follows its target would have."""
        magnitudes = (store.memory.everything() + gradient).abs().numpy()
        return float(np.partition(magnitudes, -self._count)[-self._count])


class Store:
    """A rank's memory as a group has it, and the transaction that gradients are lent to."""

    def __init__(self, layout: BlockLayout, values: str = "bf16") -> None:
        cpu = torch.device("cpu")
        kernels = for_device(cpu)
        self.transaction = Transaction(Buffer(layout, kernels, cpu))
        self.codec = Codec(values, "rice", kernels)
        self.memory = Memory(self.transaction, self.codec)

    def after_adding(self, gradient: Tensor, take: Timed) -> Timed:
        """Add a whole gradient, which becomes ours, and take entries out."""

        def once() -> object:
            self.transaction.lend("gradient", 0, gradient)
            self.transaction.add_up()
            return take()

        return once


class Coding:
    """Frames of the entries that one step selects, as one block."""

    names = (PACK, UNPACK, COPY)

    def __init__(self, elements: int, density: float, values: str) -> None:
        store = Store(BlockLayout.contiguous(elements, 1), values)
        store.transaction.lend("gradient", 0, torch.randn(elements, generator=torch.Generator().manual_seed(0)))
        self._ids, self._lengths = np.array([0]), np.array([elements])
        self._budgets = np.array([entries(density, elements)])
        self._taken: SparseBlocks = store.memory.take_largest(self._ids, self._budgets)
        self._codec = store.codec
        self.frame = self._pack()
        # Indices and values in memory, which packing reads and unpacking writes.
        self._source = torch.zeros(8 * len(self._taken), dtype=torch.uint8)
        self._target = torch.empty_like(self._source)

    def next(self, name: str) -> Timed:
        ways = {PACK: self._pack, UNPACK: self._unpack, COPY: lambda: self._target.copy_(self._source)}
        return ways[name]

    def done(self, name: str) -> None:
        pass

    def _pack(self) -> Array:
        return self._codec.pack(self._codec.code(self._taken), self._lengths, self._budgets)

    def _unpack(self) -> SparseBlocks:
        coded = self._codec.unpack(self.frame, self._ids, self._lengths, self._budgets, peer=0)
        assert coded is not None
        return coded.decode()


def selection_records(
    seconds: dict[str, list[float]], elements: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The limit of a selection is one pass to add and one to read."""
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    both = medians[ADD] + medians[READ]
    limits = dict.fromkeys(TARGETS, both) | {ADD: medians[ADD], READ: medians[READ]}
    return [
        {
            **_record(name, each, elements, options),
            "limit_s": limits[name],
            "times_add": medians[name] / medians[ADD],
            "target": TARGETS.get(name),
        }
        for name, each in seconds.items()
    ]


def coding_records(seconds: dict[str, list[float]], elements: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The limit of coding is a copy of the entries."""
    limit, count = statistics.median(seconds[COPY]), entries(options.density, elements)
    return [
        {
            **_record(name, each, elements, options),
            "limit_s": limit,
            "entries_per_s": count / statistics.median(each),
        }
        for name, each in seconds.items()
    ]


def _record(name: str, seconds: list[float], elements: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "what": name,
        "elements": elements,
        "density": options.density,
        "repetitions": len(seconds),
        "median_s": statistics.median(seconds),
        "quartiles_s": quartiles(seconds),
    }


def show(records: list[dict[str, Any]]) -> None:
    first = records[0]
    table(
        f"One thread, {first['elements']:,} elements, density {as_percent(first['density'])}",
        ("what", "median", "middle half", "limit", "x numpy.add", "target", "million entries/s"),
        [
            (
                record["what"],
                as_seconds(record["median_s"]),
                as_seconds(*record["quartiles_s"]),
                as_seconds(record["limit_s"]),
                f"{record['times_add']:.2f}" if "times_add" in record else "",
                f"{record['target']:g}" if record.get("target") else "",
                f"{record['entries_per_s'] / 1e6:.0f}" if "entries_per_s" in record else "",
            )
            for record in records
        ],
        note=f"{first['repetitions']} repetitions each, taking turns.",
    )


if __name__ == "__main__":
    main()
