"""Ray Train, complete, with checkpoints and a worker that dies:

    python examples/ray_train.py
    python examples/ray_train.py --die-at 25

`spardl.attach` takes what `prepare_model` returns. The second run loses a worker at step 25, once; Ray starts all of
them again, they go on where they had saved, and end with the same weights as the first, to the last bit.
"""

import argparse
import os
import pathlib
import tempfile

import ray
import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

import spardl

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--save-every", type=int, default=10)
options.add_argument("--workers", type=int, default=2)
options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("ray"))
options.add_argument("--name", help="of the run; one of the same name goes on where it was")
options.add_argument("--die-at", type=int, help="kill a worker after this step, once")


def on_each_worker(given):
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = spardl.attach(model, optimizer=optimizer, update="local", density=0.01)

    first = 0
    if train.get_checkpoint() is not None:  # after a failure, or of a run of this name: the last one
        with train.get_checkpoint().as_directory() as folder:
            saved = torch.load(pathlib.Path(folder) / "state.pt", weights_only=True)
        first = saved["step"]
        sync.load_state_dict(saved["sync"])

    for step in range(first, given.steps):
        inputs, labels = batch(seed=1000 * step + rank)  # what is random follows from the step
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % given.save_every == 0:
            report(rank, step + 1, sync, {"loss": loss.item()})
        if step + 1 == given.die_at and first == 0 and rank == 1:
            train.get_all_reported_checkpoints()  # Ray asks every 2 s; what it has not heard of dies with the worker
            os._exit(1)

    sync.flush()  # all workers hold the same model now
    inputs, labels = batch(seed=-1)
    judged = cross_entropy(model(inputs), labels).item()
    weights = nn.utils.parameters_to_vector(model.parameters()).double().sum().item()
    report(rank, given.steps, sync, {"validation loss": judged, "weights": weights, "first": first})


def batch(seed):
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :10].argmax(dim=1)


def report(rank, step, sync, figures):
    """All workers' states as one, which the first of them saves."""
    state = {"step": step, "sync": sync.gathered_state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(state, pathlib.Path(folder) / "state.pt")
        train.report(figures, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


if __name__ == "__main__":
    given = options.parse_args()
    ray.init(num_cpus=given.workers, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        on_each_worker,
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=given.workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=given.name, storage_path=str(given.folder.absolute()), failure_config=FailureConfig(max_failures=1)
        ),
    )
    figures = trainer.fit().metrics
    begun = f"from step {figures['first']}" if figures["first"] else "from the beginning"
    print(f"{begun}: validation loss {figures['validation loss']:.3f}, weights {figures['weights']:.10f}")
