"""What merging and overlap bring: the same model, trained with one group, one group per layer, and planned groups.

Run it as one rank per host:

    python -m benchmarks.netlab --hosts 4 --rate 100mbit -- python -m benchmarks.overlap --model vgg16

All ways train side by side in one run, a few steps of each in turn, so that noise hits all alike. The limit is a
step in which nothing is sent. Rank 0 prints the medians, the plan and, with --picture, draws its timeline.
"""

import argparse
import json
import statistics

import torch.distributed as dist

import spardl
from benchmarks.training import Training, take_turns
from spardl.cli.output import table
from spardl.integrations.arranger import MEASURED, WARM_UP
from spardl.planning.merging import Merging
from spardl.planning.timeline import COLUMNS

WAYS = {
    "one group after backward": "single",
    "one group per tensor": "layer",
    "published greedy": "omgs",
    "planned groups": "exact",
}
NOTHING = "nothing is sent"


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
    alone = Training(options.model, options.batch_size, lambda model, optimizer: None, synchronised=False)
    runs = {NOTHING: alone, **{title: training(options, merge) for title, merge in WAYS.items()}}
    take_turns(runs, warmup=1 + WARM_UP + MEASURED + 2, rounds=options.rounds, steps=options.steps)
    if dist.get_rank() == 0:
        report(options, runs)
    dist.barrier()


def training(options: argparse.Namespace, merge: str) -> Training:
    settings = {"method": options.method, "density": options.density, "merge": merge}
    settings |= {"values": options.values, "indices": options.indices}
    return Training(
        options.model,
        options.batch_size,
        lambda model, optimizer: spardl.attach(model, optimizer=optimizer, **settings),
    )


def merging_of(run: Training) -> Merging:
    assert isinstance(run.made, spardl.SparDLState) and run.made.merging is not None
    return run.made.merging


def report(options: argparse.Namespace, runs: dict[str, Training]) -> None:
    single, limit = (statistics.median(runs[title].seconds) for title in ("one group after backward", NOTHING))
    rows, records = [], []
    for title in WAYS:
        run = runs[title]
        median = statistics.median(run.seconds)
        low, _, high = statistics.quantiles(run.seconds, n=4)
        merging = merging_of(run)
        groups = len(merging.after.groups)
        predicted = merging.after.timeline.iteration
        rows.append(
            (title, f"{groups}", f"{median * 1e3:.1f} ms", f"{low * 1e3:.1f} to {high * 1e3:.1f} ms",
             f"{single / median:.2f}x", f"{predicted * 1e3:.1f} ms", f"{median / limit:.2f}")
        )  # fmt: skip
        figures = {"median_s": median, "quartiles_s": [low, high], "predicted_s": predicted, "limit_s": limit}
        records.append({"way": title, "groups": groups, **figures})
    sizes = runs["planned groups"].sizes
    table(
        f"{options.model}: {sum(sizes):,} parameters in {len(sizes)} tensors, {dist.get_world_size()} workers,"
        f" {options.method} at {options.density:g}",
        ("synchronisation", "groups", "time per step", "quartiles", "against one group", "predicted", "x of limit"),
        rows,
        note=f"limit: {limit * 1e3:.1f} ms, the same step when nothing is sent",
    )
    merging = merging_of(runs["planned groups"])
    plan = [tuple(f"{each:.2f}" if isinstance(each, float) else str(each) for each in row) for row in merging.table()]
    table("The plan", COLUMNS, plan)
    if options.picture:
        merging.draw(options.picture)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"settings": vars(options), "ways": records, "plan": merging.to_dict()}, file, indent=1)


if __name__ == "__main__":
    main()
