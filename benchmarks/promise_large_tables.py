"""Two trainings whose weights are mostly embedding tables: a word-level language model, and a recommender.

Words of a text are as skewed as the categories of a recommender: half of them occur once or twice.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
from promise_small import SEARCH_BATCHES, SEARCH_SHARE, Batch, of_loss, warm_up_and_decay
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from workloads import Workload, text_of

WORDS = 12_000
"""Words that have a row of their own; all rarer ones share one."""
WINDOW = 24
"""Words in a window of text."""


@lru_cache
def _tokens(data: Path) -> tuple[Tensor, Tensor]:
    """Return the text as word ids, most frequent first, int64; and the number of each speech's speaker, for each."""
    found = re.findall(r"[a-z']+|[^\sa-z']|\n", text_of(data).lower())
    ids = {word: i for i, (word, _) in enumerate(Counter(found).most_common(WORDS - 1))}
    speakers: dict[tuple[str, ...], int] = {}
    speaker, line = 0, []  # type: int, list[str]
    of_word = []
    for word in found:
        line = [] if word == "\n" else [*line, word]
        if word == ":" and len(line) <= 4:
            speaker = speakers.setdefault(tuple(line), len(speakers) + 1)
        of_word.append(speaker)
    return torch.tensor([ids.get(word, WORDS - 1) for word in found]), torch.tensor(of_word)


def _parts(length: int) -> tuple[slice, slice, slice]:
    """Return the parts of a text for training (90 %), for searches and for the end."""
    train = int(0.9 * length)
    seen = train + int(SEARCH_SHARE * (length - train))
    return slice(0, train), slice(train, seen), slice(seen, length)


class WordModel(nn.Module):
    """A causal transformer over words, pre-norm, with learned positions. The head is the embedding."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.positions = nn.Parameter(torch.randn(WINDOW, width) * 0.02)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Map word ids, int64 (batch, length), to logits (batch, length, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.words(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = F.linear(self.norm(x), self.words.weight)
        return logits


def words(data: Path, cache: Path, steps: int, seed: int) -> Workload:  # noqa: ARG001
    """Return the training of a language model with 12,000 tied embeddings, AdamW, warm-up, constant, decay."""
    tokens, _ = _tokens(data)
    train, seen, unseen = (tokens[part] for part in _parts(len(tokens)))
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = WordModel(WORDS, width=96, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.98))
    size = 8

    def draw() -> Batch:
        starts = torch.randint(len(train) - WINDOW - 1, (size, 1), generator=generator)
        window = train[starts + torch.arange(WINDOW + 1)]
        return window[:, :-1], window[:, 1:]

    held_out = _windows(seen, SEARCH_BATCHES * size), _windows(unseen, 512)
    schedule = warm_up_and_decay(steps, decay_from=0.8)
    return of_loss(model, (optimizer,), [schedule], generator, draw, size, held_out, steps)


def _windows(tokens: Tensor, count: int) -> Batch:
    """Return evenly spaced windows and the same one word later, each (count, WINDOW)."""
    starts = torch.linspace(0, len(tokens) - WINDOW - 1, count).long()
    window = tokens[starts[:, None] + torch.arange(WINDOW + 1)]
    return window[:, :-1], window[:, 1:]


class Recommender(nn.Module):
    """One embedding table for each field, the products of all pairs of fields, and an MLP over both."""

    def __init__(self, rows: tuple[int, ...], width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        pairs = len(rows) * (len(rows) - 1) // 2
        self.pairs = torch.triu_indices(len(rows), len(rows), 1)
        self.mlp = nn.Sequential(nn.Linear(len(rows) * width + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, fields: Tensor) -> Tensor:
        """Map categories, int64 (batch, fields), to logits (batch, 2)."""
        found = torch.stack([table(ids) for table, ids in zip(self.tables, fields.unbind(1), strict=True)], 1)
        products = (found @ found.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.mlp(torch.cat([found.flatten(1), products], 1))
        return logits


def clicks(data: Path, cache: Path, steps: int, seed: int) -> Workload:  # noqa: ARG001
    """Return the training of a recommender with Adagrad at a constant rate.

    It tells from the speaker and the two words before whether a word is the next one or drawn from the whole text.
    """
    tokens, speakers = _tokens(data)
    train, seen, unseen = _parts(len(tokens))
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Recommender((WORDS, WORDS, WORDS, int(speakers.max()) + 1), width=16, hidden=64)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    size = 256

    def drawn(part: slice, count: int, source: torch.Generator) -> Batch:
        last = min(part.stop, len(tokens)) - 1
        at = torch.randint(part.start + 2, last, (count,), generator=source)
        other = tokens[torch.randint(last, (count,), generator=source)]
        follows = torch.randint(2, (count,), generator=source)
        word = torch.where(follows.bool(), tokens[at], other)
        return torch.stack([tokens[at - 2], tokens[at - 1], word, speakers[at]], 1), follows

    fixed = torch.Generator().manual_seed(1)
    held_out = drawn(seen, SEARCH_BATCHES * size, fixed), drawn(unseen, 64 * size, fixed)

    def draw() -> Batch:
        return drawn(train, size, generator)

    def constant(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda _: 1.0)

    return of_loss(model, (optimizer,), [constant], generator, draw, size, held_out, steps)
