"""Lightning, complete, with checkpoints:

    python examples/lightning_module.py
    python examples/lightning_module.py --epochs 8 --resume

Lightning starts the two processes itself; under torchrun it takes those that it finds. The one line of spardl is the
callback.
"""

import argparse
import pathlib

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from spardl.integrations.lightning import SparseSync

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=4)
options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoints"))
options.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
given = options.parse_args()


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        inputs, labels = batch
        return cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch, index):  # with the weights that all ranks share
        inputs, labels = batch
        self.log("validation", cross_entropy(self.layers(inputs), labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def examples(count, seed):
    inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :10].argmax(dim=1))


seed_everything(0, verbose=False)
module = Classifier()
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=given.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    precision="bf16-mixed",
    callbacks=[
        SparseSync(density=0.01),
        ModelCheckpoint(dirpath=given.folder, save_last=True),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    module,
    DataLoader(examples(2048, seed=1), batch_size=32, shuffle=True),
    DataLoader(examples(512, seed=2), batch_size=128),
    ckpt_path=given.folder / "last.ckpt" if given.resume else None,
    weights_only=True,
)
weights = nn.utils.parameters_to_vector(module.parameters()).double()
if trainer.is_global_zero:
    loss = trainer.callback_metrics["validation"]
    print(f"epoch {given.epochs}: validation loss {loss:.3f}, weights {weights.sum().item():.10f}")
