"""One slow rank, for real: what does it cost, and what do fitted local steps win back?

    python -m benchmarks.questions.slow_rank            # about a minute; needs scikit-learn for its digits

Two processes train a small network on digits with local updates. Rank 1 computes every forward and backward pass
several times over, so it is slower by real work. Both paces do as many exchanges; a step is an eighth of the time from
one to the next.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy

import spardl
from benchmarks.ranks import free_port
from spardl.cli.output import as_seconds, table
from spardl.train.data.digits import digits

EVERY, DELAY, DENSITY = 8, 1, 0.01
EXCHANGES, SETTLED = 40, 10
BATCH, WIDTH = 128, 512
SLOWER = (1, 2, 4)
PACES = ("even", "fitted")


@dataclass(frozen=True)
class Outcome:
    """Of one run: seconds of a step, batches per second over both ranks, steps by rank, and losses at the end."""

    slower: int
    pace: str
    step: float
    batches: float
    counts: list[int]
    loss: float
    accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=EXCHANGES, metavar="N")
    options = parser.parse_args()
    outcomes = []
    for slower in SLOWER:
        for pace in PACES:
            with TemporaryDirectory() as folder:
                target = Path(folder) / "outcome.pt"
                mp.spawn(train, (free_port(), slower, pace, options.exchanges, target), nprocs=2)
                outcomes.append(Outcome(**torch.load(target)))
    show(outcomes, options.exchanges)


def train(rank: int, port: int, slower: int, pace: str, exchanges: int, target: Path) -> None:
    """One rank of one run; rank 0 leaves the outcome in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model.append(nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rule = {"update": "local", "every": EVERY, "delay": DELAY, "pace": pace}
    sync = spardl.attach(model, optimizer=optimizer, density=DENSITY, **rule)
    data = digits()
    images, labels = data.train.columns
    generator = torch.Generator().manual_seed(rank)
    marks, taken = [time.perf_counter()], 0
    for step in range(exchanges * EVERY):
        if not sync.rests():
            chosen = torch.randint(len(labels), (BATCH,), generator=generator)
            for _ in range(slower if rank == 1 else 1):
                optimizer.zero_grad()
                cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            taken += step >= SETTLED * EVERY
        if (step + 1) % EVERY == 0:
            marks.append(time.perf_counter())
    between = statistics.median(b - a for a, b in zip(marks[SETTLED:], marks[SETTLED + 1 :], strict=False))
    batches = torch.tensor(taken / (marks[-1] - marks[SETTLED]))
    dist.all_reduce(batches)
    sync.flush()
    with torch.no_grad():
        loss = float(cross_entropy(model(images), labels))
        tested, truth = data.test.columns
        accuracy = float((model(tested).argmax(1) == truth).float().mean())
    if rank == 0:
        found = Outcome(slower, pace, between / EVERY, float(batches), sync.local_steps, loss, accuracy)
        torch.save(vars(found), target)
    dist.destroy_process_group()


def show(outcomes: list[Outcome], exchanges: int) -> None:
    rows = [
        (
            f"{each.slower}x",
            each.pace,
            ", ".join(map(str, each.counts)),
            as_seconds(each.step),
            f"{each.batches:.0f}",
            f"{each.loss:.4f}",
            f"{100 * each.accuracy:.1f} %",
        )
        for each in outcomes
    ]
    columns = ("rank 1 slower", "pace", "steps by rank", "a step", "batches per second", "training loss", "accuracy")
    table(f"Two ranks, {exchanges} exchanges, {EVERY} steps each", columns, rows)


if __name__ == "__main__":
    main()
