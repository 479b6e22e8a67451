"""Fine-tuning of pretrained weights: MiniLM learns to tell whether one sentence follows another.

The sentences are those of Python's documentation. The head is new, so the metric is at chance at the first saves.
"""

from __future__ import annotations

import random
import re
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
from promise_small import SEARCH_BATCHES, Batch, of_loss
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from workloads import Workload

SIZE, LENGTH = 8, 40
"""Pairs in a batch, tokens in a pair."""
SEEN, UNSEEN = SEARCH_BATCHES * SIZE, 640
"""Pairs for searches, and for the end."""


class Tuned(nn.Module):
    """The pretrained encoder, the mean over the tokens, and a new linear layer."""

    def __init__(self) -> None:
        super().__init__()
        from minilm import tools  # noqa: PLC0415  # only `make benchmark-setup` installs what it needs

        self.encoder = deepcopy(tools()[1])
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids, int64 (batch, LENGTH), to logits (batch, 2). 0 is padding."""
        mask = (ids != 0).to(torch.float32)[..., None]
        hidden = self.encoder(input_ids=ids, attention_mask=mask[..., 0]).last_hidden_state
        logits: Tensor = self.head((hidden * mask).sum(1) / mask.sum(1))
        return logits


@lru_cache
def _pairs() -> tuple[Tensor, Tensor]:
    """Return pairs of sentences as token ids, (count, LENGTH), and whether the second follows; shuffled."""
    from minilm import tools  # noqa: PLC0415

    drawn = random.Random(0)
    texts = [
        [s for s in re.split(r"(?<=[.!?]) ", " ".join(topics[name].split())) if 40 < len(s) < 200 and s[0].isupper()]
        for name in sorted(topics)
    ]
    follow = [(a, b) for text in texts for a, b in pairwise(text)]
    every = [sentence for text in texts for sentence in text]
    others = [(a, drawn.choice(every)) for a, _ in follow]
    pairs = [(pair, 1) for pair in follow] + [(pair, 0) for pair in others]
    drawn.shuffle(pairs)
    first, second = ([pair[i] for pair, _ in pairs] for i in (0, 1))
    tokens = tools()[0](first, second, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return tokens["input_ids"], torch.tensor([label for _, label in pairs])


def minilm(data: Path, cache: Path, steps: int, seed: int) -> Workload:  # noqa: ARG001
    """Return the fine-tuning of MiniLM, 22 M weights, with AdamW, warm-up and linear decay."""
    ids, labels = _pairs()
    train = len(ids) - SEEN - UNSEEN
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Tuned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=True)

    def draw() -> Batch:
        drawn = torch.randint(train, (SIZE,), generator=generator)
        return ids[drawn], labels[drawn]

    def falling(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps)))

    held_out = (ids[train:-UNSEEN], labels[train:-UNSEEN]), (ids[-UNSEEN:], labels[-UNSEEN:])
    return of_loss(model, (optimizer,), [falling], generator, draw, SIZE, held_out, steps)
