"""A small GPT on characters, in two replicas of two parts each: FSDP2 within a replica, sparse between replicas.

    torchrun --standalone --nproc-per-node 4 examples/fsdp.py
    torchrun --standalone --nproc-per-node 4 examples/fsdp.py --resume

The mesh has two dimensions, as for HSDP. `fully_shard` gets the fast one, within a machine; `spardl.attach` gets the
slow one, between machines. Checkpoints are those of torch.distributed.checkpoint: one folder for all ranks.
"""

import argparse
import pathlib
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import spardl

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--stop-after", type=int, help="save and stop after this many steps")
options.add_argument("--resume", action="store_true")
options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoint"))
given = options.parse_args()

batch, window, width = 8, 64, 64

# --- data: Python's own documentation, character by character -------------------------------------------------------

text = "".join(topics.values())
vocabulary = sorted(set(text))
number = {character: index for index, character in enumerate(vocabulary)}
data = torch.tensor([number[character] for character in text])
training, validation = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(vocabulary), width), nn.Embedding(window, width)
        layer = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(width, **layer) for _ in range(2)])
        self.scores = nn.Linear(width, len(vocabulary))

    def forward(self, x):
        past = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=past, is_causal=True)
        return self.scores(x.flatten(0, 1))


def loss_of(model, part, source):
    starts = torch.randint(len(part) - window - 1, (batch,), generator=source)
    rows = torch.stack([part[start : start + window + 1] for start in starts])
    return cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())


# --- a mesh, a model in parts, and the one line ---------------------------------------------------------------------

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
model = Gpt()
for block in model.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

sync = spardl.attach(model, optimizer=optimizer, replicate=mesh["replicate"], update="local", density=0.01)

# --- training -------------------------------------------------------------------------------------------------------

first = 0
if given.resume:
    state = {"model": get_model_state_dict(model), "step": 0}
    dcp.load(state, checkpoint_id=given.folder)
    set_model_state_dict(model, state["model"])
    # Last, since each replica has weights and moments of its own. The folder tells how many ranks have saved it.
    dcp.load({"sync": sync.sharded(given.folder)}, checkpoint_id=given.folder)
    first = state["step"]

for step in range(first, given.steps):
    source = torch.Generator().manual_seed(1000 * step + rank)  # each rank has data of its own
    optimizer.zero_grad()
    loss_of(model, training, source).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # and what this rank's part has moved by is exchanged with the other replica
    if step + 1 == given.stop_after:
        break

if given.stop_after is None:
    sync.flush()  # the end: all that is left, so that replicas are the same

with sync.shared(), torch.no_grad():  # the same weights in every replica
    state = {"model": get_model_state_dict(model), "step": step + 1}
    dcp.save({**state, "sync": sync.sharded()}, checkpoint_id=given.folder)
    weights = sum(tensor.full_tensor().double().sum().item() for tensor in state["model"].values())
    source = torch.Generator().manual_seed(7)
    judged = sum(loss_of(model, validation, source).item() for _ in range(8)) / 8

total = sync.stats().total
if rank == 0:
    print(f"step {step + 1}: validation loss {judged:.3f}, weights {weights:.10f}")
    print(f"{total.bytes_sent / total.steps:.0f} bytes per step for the {total.elements} weights of this part")
dist.destroy_process_group()
