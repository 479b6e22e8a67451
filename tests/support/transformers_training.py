"""A training with Transformers' Trainer that a test may kill, for ``forked_trainings``."""

import os
import signal
import time
import warnings
from hashlib import blake2b
from typing import Any

import torch
from forked_trainings import say, serve
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState
from where import on_cpu

from dynaquant.integrations.transformers import Trainer, get_last_checkpoint

STEPS = 60
PER_CALL = ("runtime", "per_second", "train_loss")
"""What Transformers logs of one call of ``train``."""


def model_of(**changes: Any) -> LlamaForCausalLM:
    """Return a Llama of two layers. Its dropout depends on random numbers."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.1,
            **changes,
        )
    )


def sequences(number: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count modulo 64 in steps of 1 to 7."""
    counts = [(torch.arange(16) * (i % 7 + 1) + i) % 64 for i in range(first, first + number)]
    return [{"input_ids": count, "labels": count} for count in counts]


def arguments(folder: Any, **changes: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "save_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "logging_steps": 7,  # so that saves lie between two logs
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": on_cpu(),
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


class Counter(TrainerCallback, ExportableState):
    """A callback with a state: it counts evaluations."""

    def __init__(self) -> None:
        self.evaluations = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluations": self.evaluations}}

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.evaluations += 1


class Speaker(TrainerCallback):
    """Prints every step and makes it longer; sends a signal to one rank, or to all."""

    def __init__(self, pause: float, kill_at: int, term_at: int) -> None:
        self._pause, self._kill_at, self._term_at = pause, kill_at, term_at

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        say("step", state.global_step)
        time.sleep(self._pause)
        if state.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self._term_at and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def hash_of(model: nn.Module) -> str:
    return blake2b(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()


def history_of(trainer: Any) -> list[dict[str, float]]:
    """Return the log history without what depends on time, or on how often ``train`` was called."""
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in PER_CALL)}
        for entry in trainer.state.log_history
    ]


def train(
    folder: str, dynaquant: dict[str, Any], pause: float = 0.0, kill_at: int = 0, term_at: int = 0, **changes: Any
) -> dict[str, Any]:
    """Train to the end, from the last checkpoint if there is one. Returns what must not depend on kills.

    pause: seconds that each step takes longer. kill_at: the step at which all ranks are killed. term_at: the step at
    which rank 1 gets a SIGTERM.
    """
    counter = Counter()
    trainer = Trainer(
        model_of(),
        arguments(folder, restore_callback_states_from_checkpoint=True, **changes),
        train_dataset=sequences(96),
        eval_dataset=sequences(32, 96),
        callbacks=[counter, Speaker(pause, kill_at, term_at)],
        dynaquant=dynaquant,
    )
    trainer.train(resume_from_checkpoint=True if get_last_checkpoint(folder) else None)
    return {
        "weights": hash_of(trainer.model),
        "history": history_of(trainer),
        "steps": trainer.state.global_step,
        "flos": trainer.state.total_flos,
        "evaluations": trainer.state.stateful_callbacks["Counter"]["attributes"]["evaluations"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    serve(train)
