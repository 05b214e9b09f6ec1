"""Whole training steps: how many per second with DDP as it is, with torch's hooks, and with spardl.

Run it as one rank per host:

    python -m benchmarks.netlab --hosts 4 --rate 200mbit -- python -m benchmarks.endtoend --model vgg16 --rate 200mbit

All ways train side by side in one run, each on its own copy of the model and the same made-up data, a few steps of each
in turn. The limit of a step is the same step when nothing is sent, or the bytes that spardl's density must move over
the line, if those take longer. --rate says what the line is; it limits nothing itself. PowerSGD gets one bucket: with
several, its hook starts all-reduces from gloo's threads in another order on every rank, and gloo gives up.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import spardl
from benchmarks.training import Prepare, Training, take_turns
from spardl.bench.limits import limit, sparse_bytes
from spardl.bench.run import quartiles
from spardl.cli.curves import INK, PALETTE, STYLE
from spardl.cli.output import as_percent, as_rate, as_ratio, as_seconds, table
from spardl.cli.units import bytes_per_second
from spardl.integrations.arranger import MEASURED, WARM_UP
from spardl.memory.layout import entries

NOTHING = "nothing is sent"
DENSE = "DDP dense"
OURS = "spardl"
PLANNED = "spardl, planned groups"
HOOK_STARTS = 2  # torch's PowerSGD needs so many dense steps first
ONE_BUCKET_MB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16", help="a model for 32 x 32 images, lstm-small or lstm-wikitext2")
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank; default: %(default)s")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--values", default="bf16", help="format of values on the wire; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way; default: %(default)s")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn; default: %(default)s")
    parser.add_argument("--rate", default="inf", help="of each host's line, to compute the limit with: 200mbit")
    parser.add_argument("--picture", metavar="FILE", help="draw steps per second")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    runs = trainings(options)
    for _ in range(1 + WARM_UP + MEASURED):  # until it has made its plan
        runs[PLANNED].step()
    take_turns(runs, warmup=HOOK_STARTS + 2, rounds=options.rounds, steps=options.steps)
    if dist.get_rank() == 0:
        found = records(options, runs)
        show(found)
        if options.json:
            Path(options.json).write_text("".join(json.dumps(record) + "\n" for record in found))
        if options.picture:
            draw(found, options.picture)
    dist.barrier()


def trainings(options: argparse.Namespace) -> dict[str, Training]:
    def way(prepare: Prepare, **settings: Any) -> Training:
        return Training(options.model, options.batch_size, prepare, **settings)

    def attach(**settings: Any) -> Prepare:
        given = {"density": options.density, "values": options.values, **settings}
        return lambda model, optimizer: spardl.attach(model, optimizer=optimizer, **given)

    return {
        NOTHING: way(lambda model, optimizer: None, synchronised=False),
        DENSE: way(lambda model, optimizer: None),
        "fp16 hook": way(lambda model, optimizer: model.register_comm_hook(None, fp16_compress_hook)),
        "PowerSGD hook, rank 1": way(low_rank(1), bucket_mb=ONE_BUCKET_MB),
        "PowerSGD hook, rank 4": way(low_rank(4), bucket_mb=ONE_BUCKET_MB),
        OURS: way(attach()),
        PLANNED: way(attach(merge="exact")),
    }


def low_rank(rank: int) -> Prepare:
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=HOOK_STARTS)
    return lambda model, optimizer: model.register_comm_hook(state, powerSGD_hook)


def records(options: argparse.Namespace, runs: dict[str, Training]) -> list[dict[str, Any]]:
    medians = {way: statistics.median(run.seconds) for way, run in runs.items()}
    elements, workers, rate = sum(runs[DENSE].sizes), dist.get_world_size(), bytes_per_second(options.rate)
    payload = sparse_bytes(entries(options.density, elements), elements, options.values)
    least = max(medians[NOTHING], limit(payload=payload, workers=workers, rate=rate).network)
    return [
        {
            "way": way,
            "model": options.model,
            "elements": elements,
            "workers": workers,
            "batch_size": options.batch_size,
            "density": options.density,
            "rate": rate if math.isfinite(rate) else None,
            "steps": len(run.seconds),
            "median_s": medians[way],
            "quartiles_s": quartiles(run.seconds),
            "steps_per_s": 1 / medians[way],
            "speedup_vs_dense": medians[DENSE] / medians[way],
            "limit_s": least,
            "times_limit": medians[way] / least,
        }
        for way, run in runs.items()
    ]


def title(found: list[dict[str, Any]]) -> str:
    first = found[0]
    parts = [
        f"{first['model']}: {first['elements']:,} parameters",
        f"{first['workers']} workers with {first['batch_size']} examples each",
        f"density {as_percent(first['density'])}",
    ]
    if first["rate"]:
        parts.append(as_rate(first["rate"]))
    return ", ".join(parts)


def show(found: list[dict[str, Any]]) -> None:
    table(
        title(found),
        ("synchronisation", "steps per second", "time per step", "middle half", "x of limit", "against dense"),
        [
            (
                record["way"],
                f"{record['steps_per_s']:.2f}",
                as_seconds(record["median_s"]),
                as_seconds(*record["quartiles_s"]),
                f"{record['times_limit']:.2f}",
                "" if record["way"] == DENSE else as_ratio(record["speedup_vs_dense"]),
            )
            for record in found
        ],
        note=f"{found[0]['steps']} steps each, taking turns. limit: {as_seconds(found[0]['limit_s'])} per step.",
    )


def draw(found: list[dict[str, Any]], target: str) -> None:
    """Steps per second as bars, and the limit as a line."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [record for record in found if record["way"] != NOTHING]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.3 + 0.42 * len(shown)), layout="constrained")
        axes = figure.subplots()
        colours = [PALETTE[0] if record["way"].startswith(OURS) else "#b8bcc2" for record in shown]
        axes.barh(range(len(shown)), [record["steps_per_s"] for record in shown], height=0.62, color=colours)
        for row, record in enumerate(shown):
            words = f"{record['steps_per_s']:.2f}  ({record['speedup_vs_dense']:.1f}x)"
            place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(words, (record["steps_per_s"], row), **place)
        most = 1 / found[0]["limit_s"]
        axes.axvline(most, color=INK, linewidth=1.2, linestyle=(0, (1, 2)))
        beside: dict[str, Any] = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "fontsize": "small"}
        axes.annotate("limit", (most, -0.62), **beside)
        axes.set_yticks(range(len(shown)), [record["way"] for record in shown])
        axes.set_ylim(len(shown) - 0.4, -0.9)
        axes.set_xlim(0, 1.25 * max(most, *(record["steps_per_s"] for record in shown)))
        axes.set_xlabel("steps per second (against dense)")
        figure.suptitle(title(found), x=0.01, ha="left", fontsize="small")
        figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
