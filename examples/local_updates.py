"""A small GPT on characters, every rank with weights of its own:

    torchrun --standalone --nproc-per-node 2 examples/local_updates.py
    torchrun --standalone --nproc-per-node 2 examples/local_updates.py --resume

Gradient accumulation, clipping, AdamW in two groups, a cosine schedule, a GradScaler and checkpoints are as one would
write them without spardl. The one line that makes it train together is `spardl.attach`.
"""

import argparse
import math
import pathlib
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import spardl

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--stop-after", type=int, help="save and stop after this many steps")
options.add_argument("--resume", action="store_true")
options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoint"))
options.add_argument("--dtype", choices=["float32", "float16"], default="float32")
given = options.parse_args()

batch, window, width, micro_batches, rate = 8, 64, 64, 2, 3e-3

# --- data: Python's own documentation, character by character -------------------------------------------------------

text = "".join(topics.values())
vocabulary = sorted(set(text))
number = {character: index for index, character in enumerate(vocabulary)}
data = torch.tensor([number[character] for character in text])
training, validation = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def windows(part, source):
    starts = torch.randint(len(part) - window - 1, (batch,), generator=source)
    rows = torch.stack([part[start : start + window + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


# --- model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + self.merge(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.between(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(vocabulary), width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, len(vocabulary))

    def forward(self, x):
        return self.scores(self.norm(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]])))


def loss_of(model, part, source):
    inputs, targets = windows(part, source)
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# --- training -------------------------------------------------------------------------------------------------------

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Gpt()
matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99))
scaler = torch.amp.GradScaler("cpu", enabled=given.dtype == "float16")
mixed = torch.autocast("cpu", torch.float16) if given.dtype == "float16" else nullcontext()

sync = spardl.attach(model, optimizer=optimizer, scaler=scaler, update="local", density=0.01)

first = 0
if given.resume:  # each rank its own file: weights and moments are its own
    saved = torch.load(given.folder / f"{rank}.pt", weights_only=True)
    first = saved["step"]
    scaler.load_state_dict(saved["scaler"])
    sync.load_state_dict(saved["sync"])  # brings the model's and the optimizer's state of this rank along

for step in range(first, given.steps):
    source = torch.Generator().manual_seed(1000 * step + rank)  # each rank has data of its own
    for group in optimizer.param_groups:
        group["lr"] = rate * (0.1 + 0.45 * (1 + math.cos(math.pi * step / given.steps))) * min(1.0, (step + 1) / 20)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        with mixed:
            loss = loss_of(model, training, source) / micro_batches
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step + 1 == given.stop_after:
        break

if given.stop_after is not None:
    given.folder.mkdir(exist_ok=True)
    state = {"step": step + 1, "scaler": scaler.state_dict(), "sync": sync.state_dict()}
    torch.save(state, given.folder / f"{rank}.pt")
else:
    sync.flush()

with sync.shared(), torch.no_grad():  # the same weights on every rank
    source = torch.Generator().manual_seed(7)
    judged = sum(loss_of(model, validation, source).item() for _ in range(8)) / 8
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).double()
total = sync.stats().total
if rank == 0:
    print(f"step {step + 1}: validation loss {judged:.3f}, weights {weights.sum().item():.10f}")
    print(f"{total.bytes_sent / total.steps:.0f} bytes per step for {total.elements} weights")
dist.destroy_process_group()
