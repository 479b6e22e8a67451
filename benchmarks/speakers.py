"""Fine-tune a sentence encoder to tell who speaks a line of Shakespeare."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from minilm import tools
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import key_of

from dynaquant.engine.tensors.hashing import tensor_hash

SPEAKERS = 8
TOKENS, BATCH = 32, 16
RATE, HEAD_RATE = 1.5e-4, 3e-3
"""Learning rates of the encoder and of the new linear layer."""

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """Speeches: token ids and attention masks, (count, TOKENS), and who speaks, (count,)."""

    ids: Tensor
    mask: Tensor
    speaker: Tensor


@dataclass(frozen=True)
class Task:
    """The task to tell who speaks. names: of the speakers."""

    training: Part
    test: Part
    names: list[str]

    @property
    def most_frequent(self) -> float:
        """The accuracy of always naming the most frequent speaker."""
        return int(self.test.speaker.bincount().max()) / len(self.test.speaker)


def speeches(text: str, speakers: int) -> list[tuple[str, str]]:
    """Return name and words of all speeches by the most frequent speakers, in the same random order each time."""
    parts = (block.partition(":\n") for block in text.split("\n\n"))
    found = [(name, " ".join(words.split())) for name, _, words in parts if words.strip() and "\n" not in name]
    often = [name for name, _ in Counter(name for name, _ in found).most_common(speakers)]
    kept = [(name, words) for name, words in found if name in often]
    random.Random(0).shuffle(kept)
    return kept


def new_task(text: str, training: int, test: int | None) -> Task:
    """Return a task. training, test: numbers of speeches to train on and to test with; None for all others."""
    found = speeches(text, SPEAKERS)[: None if test is None else training + test]
    names = sorted({name for name, _ in found})
    tokenizer = tools()[0]
    words = [words for _, words in found]
    tokens = tokenizer(words, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    speaker = torch.tensor([names.index(name) for name, _ in found])
    columns = tokens["input_ids"], tokens["attention_mask"], speaker
    first, second = (Part(*(column[part] for column in columns)) for part in (slice(training), slice(training, None)))
    return Task(first, second, names)


class Classifier(nn.Module):
    """The encoder with given weights, the mean over the tokens, and a linear layer."""

    def __init__(self, state: State, classes: int) -> None:
        super().__init__()
        self.encoder = deepcopy(tools()[1])
        self.encoder.load_state_dict(state, strict=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Map token ids and attention masks, (batch, TOKENS), to logits, (batch, classes)."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None]
        logits: Tensor = self.head((hidden * weights).sum(1) / weights.sum(1))
        return logits


@dataclass(frozen=True)
class Tuned:
    """Results of a fine-tuned model on the test speeches. loss: mean cross-entropy in nats."""

    accuracy: float
    loss: float


def fine_tune(state: State, task: Task, steps: int, seed: int, what: str) -> Tuned:
    """Fine-tune all weights, with AdamW and a learning rate that falls to zero. what: shown beside the progress."""
    torch.manual_seed(seed)
    model = Classifier(state, len(task.names)).train()
    groups = [{"params": model.encoder.parameters()}, {"params": model.head.parameters(), "lr": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / steps, steps)
    data = task.training
    order: list[int] = []
    for _ in track(range(steps), description=f"fine-tuning: {what}"):
        if len(order) < BATCH:
            order = torch.randperm(len(data.ids)).tolist()
        drawn, order = order[:BATCH], order[BATCH:]
        loss = F.cross_entropy(model(data.ids[drawn], data.mask[drawn]), data.speaker[drawn])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
    model.eval()
    test = task.test
    with torch.no_grad():
        parts = zip(torch.split(test.ids, 4 * BATCH), torch.split(test.mask, 4 * BATCH), strict=True)
        logits = torch.cat([model(ids, mask) for ids, mask in parts])
    right = int((logits.argmax(1) == test.speaker).sum())
    return Tuned(right / len(test.speaker), float(F.cross_entropy(logits, test.speaker)))


def tuned(state: State, task: Task, steps: int, seed: int, cache: Path, what: str) -> Tuned:
    """Return the result of ``fine_tune``, from the cache if the same values have been fine-tuned before."""
    values = [(name, tensor_hash(state[name])) for name in sorted(state)]
    data = len(task.training.ids), len(task.test.ids), task.names, TOKENS, BATCH
    file = cache / f"transfer-{key_of(values, data, steps, seed, RATE, HEAD_RATE, torch.__version__)}.json"
    if not file.exists():
        found = fine_tune(state, task, steps, seed, what)
        file.write_text(json.dumps(asdict(found)) + "\n")
    return Tuned(**json.loads(file.read_text()))
