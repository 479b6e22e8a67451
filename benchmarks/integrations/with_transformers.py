"""The training with Transformers' Trainer, from its last checkpoint if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from integrations.byte_model import (
    BATCH,
    CLIPPED,
    LOG_EVERY,
    OWN,
    Ended,
    Training,
    ended,
    main,
    model_of,
    optimizer_of,
    tell_step,
    text_of,
)
from transformers import TrainerCallback, TrainingArguments

from dynaquant.integrations.transformers import Trainer, get_last_checkpoint
from dynaquant.store.run import Run

PER_CALL = ("runtime", "per_second", "train_loss")
"""What Transformers logs of one call of ``train``."""


class Teller(TrainerCallback):  # type: ignore[misc]  # Transformers is not type-checked
    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        tell_step(state.global_step)


def train(training: Training, folder: Path, saving: str) -> Ended:
    text, model = text_of(training), model_of(training)
    arguments = TrainingArguments(
        str(folder),
        max_steps=training.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        max_grad_norm=CLIPPED,
        save_steps=training.every,
        eval_strategy="steps",
        eval_steps=training.every,
        logging_steps=LOG_EVERY,
        seed=training.seed,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer_type: Any = transformers.Trainer if saving == OWN else Trainer
    trainer = trainer_type(
        model,
        arguments,
        train_dataset=text.train,
        eval_dataset=text.validation,
        optimizers=optimizer_of(model, training),
        callbacks=[Teller()],
        **({} if saving == OWN else {"dynaquant": {"quality": saving}}),
    )
    trainer.train(resume_from_checkpoint=True if get_last_checkpoint(folder) else None)
    history = [
        {name: value for name, value in entry.items() if not any(part in name for part in PER_CALL)}
        for entry in trainer.state.log_history
    ]
    own, run = folder / f"checkpoint-{training.steps}", Run(folder / "dynaquant")
    last = own if saving == OWN else run.path(training.steps)
    return ended(model, training, text, trainer.state.global_step, history, [last], folder)


if __name__ == "__main__":
    main(train)
