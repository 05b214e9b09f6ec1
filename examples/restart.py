"""A script that restarts: when a rank dies, torchrun starts all of them again, and they go on where they had saved.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart.py --die-at 25

The second one kills a rank at step 25, once, and ends with the same weights as the first, to the last bit.
"""

import argparse
import os
import pathlib
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import spardl

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--save-every", type=int, default=10)
options.add_argument("--checkpoint", type=pathlib.Path, default=pathlib.Path("restart.pt"))
options.add_argument("--die-at", type=int, help="kill a rank after this step, in the first attempt")
given = options.parse_args()

# Where ranks meet, what an attempt that failed has left may still lie. So each attempt has a corner of its own.
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
store, rank, workers = next(dist.rendezvous("env://"))
store = dist.PrefixStore(f"attempt {attempt}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sync = spardl.attach(model, optimizer=optimizer, update="local", density=0.01)

first = 0
if given.checkpoint.exists():  # every rank finds its own part in it, and weights and moments with that
    saved = torch.load(given.checkpoint, weights_only=True)
    first = saved["step"]
    sync.load_state_dict(saved["sync"])

for step in range(first, given.steps):
    source = torch.Generator().manual_seed(1000 * step + rank)  # what is random follows from the step
    inputs = torch.randn(32, 64, generator=source)
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
    loss.backward()
    optimizer.step()
    if (step + 1) % given.save_every == 0:
        state = {"step": step + 1, "sync": sync.gathered_state_dict()}  # of all ranks, so all of them call it
        if rank == 0:  # under another name until it is whole
            torch.save(state, given.checkpoint.with_suffix(".partial"))
            given.checkpoint.with_suffix(".partial").replace(given.checkpoint)
    if step + 1 == given.die_at and attempt == "0" and rank == workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)

sync.flush()
weights = nn.utils.parameters_to_vector(model.parameters()).double()
if rank == 0:
    begun = f"from step {first}" if first else "from the beginning"
    print(f"attempt {attempt}, {begun}: loss {loss.item():.3f}, weights {weights.sum().item():.10f}")
dist.destroy_process_group()
