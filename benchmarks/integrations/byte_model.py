"""What ``frameworks.py`` trains in each framework: a byte-level Llama on Shakespeare. Also how its processes report."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import stored_in
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup, set_seed

LENGTH, BATCH = 64, 8
"""Bytes in a window of text, windows in a batch."""
SEARCH_BATCHES = 16
"""Batches of validation while training. Searches may see them; the loss at the end is on other text."""
RATE, CLIPPED, WARM_UP = 2e-3, 1.0, 0.1
"""Learning rate, the largest norm of gradients, the share of steps over which the rate rises."""
LOG_EVERY = 8
"""Steps between logs. Most saves lie between two."""
OWN, VALIDATED = "own", "validated"
"""Ways to save beside the qualities: the framework's own, and the default by a metric of ``validation_step``."""

Window = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """What is trained. data: the folder with the text. every: steps between saves. final: windows of the last loss.

    epoch: steps of an epoch, not a multiple of the steps between saves, so that epochs end between two of them.
    """

    data: str
    seed: int = 0
    steps: int = 240
    every: int = 20
    epoch: int = 151
    width: int = 128
    layers: int = 4
    final: int = 1024


@dataclass(frozen=True)
class Ended:
    """What a training ends with. weights: their hash. final: the loss on text that no search has seen.

    last, total: bytes of the last checkpoint, and of all. checkpoints: how many there are.
    """

    steps: int
    weights: str
    history: Any
    final: float
    last: int
    total: int
    checkpoints: int


@dataclass(frozen=True)
class Text:
    """Windows to train on, for validation while training, and for the loss at the end."""

    train: list[Window]
    validation: list[Window]
    final: list[Window]


def text_of(training: Training) -> Text:
    """Return evenly spaced windows: 90 % of the text is for training, 2 % for validation, the rest for the end."""
    data = np.frombuffer((Path(training.data) / "shakespeare.txt").read_bytes(), dtype=np.uint8)
    train, validation, final = torch.from_numpy(data.astype(np.int64)).tensor_split(
        [int(share * len(data)) for share in (0.9, 0.92)]
    )
    return Text(
        _windows(train, training.epoch * BATCH),
        _windows(validation, SEARCH_BATCHES * BATCH),
        _windows(final, training.final),
    )


def _windows(text: Tensor, count: int) -> list[Window]:
    starts = torch.linspace(0, len(text) - LENGTH, count).long()
    return [{"input_ids": window, "labels": window} for window in text[starts[:, None] + torch.arange(LENGTH)]]


def batches(windows: list[Window]) -> list[Window]:
    """Return batches, in order."""
    return [
        {name: torch.stack([window[name] for window in windows[first : first + BATCH]]) for name in windows[first]}
        for first in range(0, len(windows), BATCH)
    ]


def model_of(training: Training) -> nn.Module:
    """Return the model at its first step, by the seed. Its dropout draws random numbers at every step."""
    set_seed(training.seed)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=training.width,
            intermediate_size=3 * training.width,
            num_hidden_layers=training.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,
        )
    )
    return model


def optimizer_of(model: nn.Module, training: Training) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW and its schedule: linear warm-up, then a cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, int(WARM_UP * training.steps), training.steps)


def loss_of(model: nn.Module, batch: Window) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def ended(
    model: nn.Module, training: Training, text: Text, steps: int, history: Any, last: Iterable[Path], folder: Path
) -> Ended:
    """Return what a training ends with. last: the files and folders of its last checkpoint. folder: of all of them."""
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, batch)) * len(batch["labels"]) for batch in batches(text.final)]
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return Ended(
        steps,
        blake2b(parameters).hexdigest(),
        history,
        sum(losses) / len(text.final),
        sum(stored_in(path) if path.is_dir() else path.stat().st_size for path in last),
        stored_in(folder),
        training.steps // training.every,
    )


def tell_step(step: int) -> None:
    """Tell the process that may kill this one that a step is done."""
    print("step", step, flush=True)


def main(train: Callable[[Training, Path, str], Ended]) -> None:
    """Train as the command line says, with one thread, so that sums have one order. Prints what it ends with."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    orders = json.loads(sys.argv[1])
    found = train(Training(**orders["training"]), Path(orders["folder"]), orders["saving"])
    print("ended", json.dumps(asdict(found)), flush=True)
