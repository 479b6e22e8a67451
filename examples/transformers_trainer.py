"""Trains with Transformers' Trainer, which saves to a run of dynaquant.

    pip install 'PATH/TO/THE/CLONE[transformers]'
    python examples/transformers_trainer.py [SECONDS]

Trains a Llama of 140,000 weights on the source code of Python, for 200 steps. It needs no GPU and downloads nothing.
SECONDS make every step longer, so that there is time to kill it. Start it again, and it goes on.
"""

import os
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

import dynaquant as dq
from dynaquant.integrations.transformers import Trainer, get_last_checkpoint  # instead of transformers.Trainer

OUT = "runs/llama"
LENGTH = 64


class Slower(TrainerCallback):
    """Makes every step longer."""

    def on_step_end(self, *_, **__):
        """Wait."""
        time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)


files = sorted(Path(os.__file__).parent.glob("*.py"))  # Python's own modules
text = torch.tensor(list(b"".join(path.read_bytes() for path in files)[: 2048 * LENGTH]))
sequences = [{"input_ids": part, "labels": part} for part in text.split(LENGTH)]

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
)
trainer = Trainer(
    model,
    TrainingArguments(
        OUT,
        max_steps=200,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        save_steps=40,
        save_total_limit=3,
        eval_strategy="steps",
        eval_steps=40,
        logging_steps=40,
        load_best_model_at_end=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=sequences[:-128],
    eval_dataset=sequences[-128:],
    callbacks=[Slower()],
    dynaquant={"quality": "balanced"},  # the default
)
last = get_last_checkpoint(OUT)
print("starting at", last or "the beginning")
trainer.train(resume_from_checkpoint=last)  # None begins anew
print(f"loss at the end: {trainer.evaluate()['eval_loss']:.3f}")

best = LlamaForCausalLM(model.config)
dq.load_into(best, f"{OUT}/dynaquant", step="best")  # for use without a Trainer
best.save_pretrained(f"{OUT}/best")
print(f"the best checkpoint is in {OUT}/best; see also: dynaquant log {OUT}/dynaquant")
