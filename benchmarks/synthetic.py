"""Make a whole Adam state with the shapes of a transformer, and the same state some steps later, without training.

The spreads of the moments and the tails of the weights' changes are like those of the GPT of ``workloads.py``.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

WEIGHT_SCALE, OUTLIERS, OUTLIER_FACTOR = 0.02, 1000, 8.0
"""Standard deviation of the weights of a typical matrix. One weight in OUTLIERS is OUTLIER_FACTOR times larger."""
MOVED = (1e-3, 1e-2)
"""How far the weights of a tensor move between two checkpoints, relative to themselves."""
MOMENTUM = 0.3
"""Size of a first moment, in square roots of the second moment."""


class Transformer(nn.Module):
    """The parameters of a GPT with about this many weights. It computes nothing."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        # As in GPT-2: width / 64 blocks of 12 · width² weights, which are four fifths of all.
        width = max(64, 64 * round((0.8 * weights / (12 / 64)) ** (1 / 3) / 64))
        blocks = max(1, round(0.8 * weights / (12 * width**2)))
        self.tokens = nn.Embedding(max(256, weights // width - 12 * width * blocks), width)
        self.blocks = nn.ModuleList(_block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)


def _block(width: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm1": nn.LayerNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "proj": nn.Linear(width, width),
            "norm2": nn.LayerNorm(width),
            "up": nn.Linear(width, 4 * width),
            "down": nn.Linear(4 * width, width),
        }
    )


def adam_state(values: int, generator: Generator) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer. Weights and both moments are about this many float32 values together."""
    model = _without_values(values // 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.data.copy_(_weights(parameter, generator))
        squares = _second_moment(parameter, generator, zipf=parameter is model.tokens.weight)
        first = MOMENTUM * squares.sqrt() * _normal(squares, generator)
        optimizer.state[parameter] = {"step": torch.tensor(1000.0), "exp_avg": first, "exp_avg_sq": squares}
    return model, optimizer


def transformer(weights: int, generator: Generator) -> nn.Module:
    """Return a model with about this many float32 weights."""
    model = _without_values(weights)
    for parameter in model.parameters():
        parameter.data.copy_(_weights(parameter, generator))
    return model


def _without_values(weights: int) -> Transformer:
    with torch.device("meta"):
        model = Transformer(weights)
    model.to_empty(device="cpu")
    return model


def advance(optimizer: torch.optim.Optimizer, generator: Generator) -> None:
    """Change the state in place, as some hundred training steps would."""
    for parameter, state in optimizer.state.items():
        low, high = MOVED
        moved = low * (high / low) ** float(torch.rand((), generator=generator))
        weight = parameter.data
        weight += moved * weight.square().mean().sqrt() * _heavy_tailed(weight, 0.35, generator)
        squares = state["exp_avg_sq"]
        squares *= torch.exp(0.2 * _normal(squares, generator))
        state["exp_avg"].copy_(MOMENTUM * squares.sqrt() * _normal(squares, generator))
        state["step"] += 1000


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of the state by name. They share memory with it."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        tensors.update({f"{key}.{name}": value for key, value in optimizer.state[parameter].items()})
    return tensors


def _weights(like: Tensor, generator: Generator) -> Tensor:
    if like.ndim < 2:
        return 1 + 0.1 * _normal(like, generator)
    weights = WEIGHT_SCALE * _factor(0.3, generator) * _heavy_tailed(like, 0.13, generator)
    outliers = torch.randint(weights.numel(), (weights.numel() // OUTLIERS,), generator=generator)
    weights.view(-1)[outliers] *= OUTLIER_FACTOR
    return weights


def _second_moment(like: Tensor, generator: Generator, zipf: bool) -> Tensor:
    """Return values that are log-normal by row, column and element. zipf: rows are tokens with frequency 1 / rank."""
    squares = torch.exp(0.3 * _normal(like, generator)) * (1e-4 * _factor(0.7, generator)) ** 2
    if like.ndim < 2:
        return squares
    rows, columns = like.shape
    by_row = 1 / torch.arange(1.0, rows + 1) if zipf else torch.exp(0.7 * torch.randn(rows, generator=generator))
    return squares.mul_(by_row[:, None]).mul_(torch.exp(0.5 * torch.randn(columns, generator=generator)))


def _normal(like: Tensor, generator: Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator)


def _heavy_tailed(like: Tensor, spread: float, generator: Generator) -> Tensor:
    """Return normal values whose scale is log-normal. Their kurtosis is 3 · exp(4 · spread²)."""
    return _normal(like, generator).mul_(torch.exp(spread * _normal(like, generator)))


def _factor(spread: float, generator: Generator) -> float:
    return float(torch.exp(spread * torch.randn((), generator=generator)))
