"""Hugging Face Accelerate, complete, with checkpoints:

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --epochs 8 --resume

The one line of spardl comes after `prepare`.
"""

import argparse
import pathlib

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from spardl.integrations.accelerate import attach

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=4)
options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoint"))
options.add_argument("--resume", action="store_true", help="go on from the folder")
given = options.parse_args()


def examples(count, seed):
    inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :10].argmax(dim=1))


accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision="bf16",
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # an order that resumes
)
set_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
training = DataLoader(examples(2048, seed=1), batch_size=32, shuffle=True)
validation = DataLoader(examples(512, seed=2), batch_size=128)
model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)

sync = attach(accelerator, model, optimizer, density=0.01)

first = 0
if given.resume:
    accelerator.load_state(given.folder)
    first = int((given.folder / "epoch").read_text())

for epoch in range(first, given.epochs):
    training.set_epoch(epoch)
    for inputs, labels in training:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(given.folder)
    if accelerator.is_main_process:
        (given.folder / "epoch").write_text(str(epoch + 1))

sync.flush()  # all ranks hold the same model now
with torch.no_grad():
    losses = [cross_entropy(model(inputs), labels) for inputs, labels in validation]
judged = accelerator.gather(torch.stack(losses)).mean().item()
weights = nn.utils.parameters_to_vector(model.parameters()).double()
if accelerator.is_main_process:
    print(f"epoch {given.epochs}: validation loss {judged:.3f}, weights {weights.sum().item():.10f}")
