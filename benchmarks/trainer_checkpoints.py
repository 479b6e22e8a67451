"""Sizes of the checkpoints of Transformers' Trainer, and of dynaquant's, for the same training.

    python benchmarks/trainer_checkpoints.py [--steps 120] [--width 128]

Trains a byte-level Llama on the source code of Python, once with Transformers' own Trainer and once with each quality.
Prints a table. The training is the same each time, so the weights at the end are, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from dynaquant.integrations.transformers import Trainer

LENGTH = 128
SAVES = 4


def sequences() -> list[dict[str, torch.Tensor]]:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)[: 8192 * LENGTH]))
    return [{"input_ids": part, "labels": part} for part in text.view(-1, LENGTH)]


def model_of(width: int) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the same sums, however busy the machine is
    data = sequences()
    ends = set()
    print("| | four checkpoints | smaller by |\n|---|---:|---:|", flush=True)
    whole = 0
    for quality in (None, "lossless", "high", "balanced", "small"):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=given.steps,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                lr_scheduler_type="cosine",
                save_steps=given.steps // SAVES,
                report_to=[],
                dataloader_pin_memory=False,
                disable_tqdm=True,
                logging_strategy="no",
                use_cpu=True,
            )
            sets = {"train_dataset": data[:-256], "eval_dataset": data[-256:]}
            trainer: Any
            if quality is None:
                trainer = transformers.Trainer(model_of(given.width), arguments, **sets)
            else:
                trainer = Trainer(model_of(given.width), arguments, **sets, dynaquant={"quality": quality})
            trainer.train()
            ends.add(blake2b(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest())
            stored = size_of(Path(folder))
        whole = whole or stored
        name = "Transformers" if quality is None else f'`quality="{quality}"`'
        print(f"| {name} | {stored / 1e6:.2f} MB | {whole / stored:.1f}× |", flush=True)
    if len(ends) != 1:
        raise SystemExit("the trainings differ")


if __name__ == "__main__":
    main()
