"""Hugging Face Trainer, complete: a small GPT on characters, with checkpoints:

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 200 --resume

The one line of spardl adds the callback.
"""

import argparse
import pathlib
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from spardl.integrations.hf import SparseSyncCallback

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=100)
options.add_argument("--save-every", type=int, default=50)
options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoints"))
options.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
given = options.parse_args()

# Python's own documentation, character by character, in windows of 64.
text = "".join(topics.values())
number = {character: index for index, character in enumerate(sorted(set(text)))}
rows = torch.tensor([number[character] for character in text[: len(text) // 64 * 64]]).view(-1, 64)
examples = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(number), n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=given.folder,
        use_cpu=not torch.cuda.is_available(),
        max_steps=given.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        max_grad_norm=1.0,
        bf16=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        save_steps=given.save_every,
        eval_strategy="steps",
        eval_steps=given.save_every,
        logging_steps=given.save_every,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=examples[: int(0.9 * len(examples))],
    eval_dataset=examples[-64:],
)
sync = SparseSyncCallback(trainer, density=0.01)
trainer.add_callback(sync)
trainer.train(resume_from_checkpoint=given.resume)

weights = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).double()
judged = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record][-1]
if trainer.is_world_process_zero():
    print(f"step {given.steps}: validation loss {judged:.3f}, weights {weights.sum().item():.10f}")
