"""What merging and overlap bring: the same model, trained with one group, one group per layer, and planned groups.

Run it as one rank per host:

    python -m benchmarks.netlab --hosts 4 --rate 100mbit -- python -m benchmarks.overlap --model vgg16

All ways train side by side in one run, a few steps of each in turn, so that noise hits all alike. Rank 0 prints the
medians, the plan and, with --picture, draws its timeline.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.cli.output import table
from spardl.integrations.ddp import MEASURED, WARM_UP
from spardl.planning.timeline import COLUMNS
from spardl.train.models import build_model

WAYS = {
    "one group after backward": "single",
    "one group per tensor": "layer",
    "published greedy": "omgs",
    "planned groups": "exact",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16", help="a model for 32 x 32 images, or mlp (24 layers of 512)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--method", default="spardl")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--values", default="bf16", help="format of values on the wire")
    parser.add_argument("--indices", default="rice", help="format of indices on the wire")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--picture", metavar="FILE", help="draw the plan's timeline")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    runs = {title: Run(options, merge) for title, merge in WAYS.items()}
    for run in runs.values():
        for _ in range(1 + WARM_UP + MEASURED + 2):
            run.step()
    for _ in range(options.rounds):
        for run in runs.values():
            dist.barrier()
            run.seconds += [run.step() for _ in range(options.steps)]
    if dist.get_rank() == 0:
        report(options, runs)
    dist.barrier()


class Run:
    """One way to train the model, with its own copy of it."""

    def __init__(self, options: argparse.Namespace, merge: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(model_of(options.model))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        formats = {"values": options.values, "indices": options.indices}
        self.sync = spardl.attach(
            self.model, optimizer=self.optimizer, method=options.method, density=options.density, merge=merge, **formats
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (512,) if options.model == "mlp" else (3, 32, 32)
        self.inputs = torch.randn(options.batch_size, *shape, generator=generator)
        self.labels = torch.randint(10, (options.batch_size,), generator=generator)
        self.seconds: list[float] = []

    def step(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()
        return time.perf_counter() - started


def model_of(name: str) -> nn.Module:
    if name == "mlp":
        layers = [layer for _ in range(23) for layer in (nn.Linear(512, 512), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(512, 10))
    return build_model(name, {"classes": 10, "channels": 3})


def report(options: argparse.Namespace, runs: dict[str, Run]) -> None:
    single = statistics.median(runs["one group after backward"].seconds)
    rows, records = [], []
    for title, run in runs.items():
        median = statistics.median(run.seconds)
        low, _, high = statistics.quantiles(run.seconds, n=4)
        merging = run.sync.merging
        assert merging is not None
        groups = len(merging.after.groups)
        predicted = merging.after.timeline.iteration
        rows.append(
            (title, f"{groups}", f"{median * 1e3:.1f} ms", f"{low * 1e3:.1f} to {high * 1e3:.1f} ms",
             f"{single / median:.2f}x", f"{predicted * 1e3:.1f} ms")
        )  # fmt: skip
        records.append({"way": title, "groups": groups, "median_s": median, "quartiles_s": [low, high]})
    parameters = sum(each.numel() for each in runs["planned groups"].model.parameters())
    tensors = len(list(runs["planned groups"].model.parameters()))
    table(
        f"{options.model}: {parameters:,} parameters in {tensors} tensors, {dist.get_world_size()} workers,"
        f" {options.method} at {options.density:g}",
        ("synchronisation", "groups", "time per step", "quartiles", "against one group", "predicted"),
        rows,
    )
    merging = runs["planned groups"].sync.merging
    assert merging is not None
    plan = [tuple(f"{each:.2f}" if isinstance(each, float) else str(each) for each in row) for row in merging.table()]
    table("The plan", COLUMNS, plan)
    if options.picture:
        merging.draw(options.picture)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"settings": vars(options), "ways": records, "plan": merging.to_dict()}, file, indent=1)


if __name__ == "__main__":
    main()
