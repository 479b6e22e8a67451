"""Whether gradients are strong where weights are large, as the estimate that stands in for a metric takes for granted.

The estimate counts what a training has learned as ``Σ F·w²``, with one F for each tensor, the mean of the squared
gradients v. It stands for ``Σ v·w²``. The two are about the same in most trainings. But where features of different
units come in, a layer has small weights with strong gradients beside large weights with weak ones, and ``F·w²`` can be
a million times too much (docs/decisions.md, "How far can the estimate be trusted?").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.engine.shards import Shards
from dynaquant.ranks.dtensors import local_of
from dynaquant.saving.movement import sampled_values
from dynaquant.search.distortion import second_moments

NOTE = (
    "gradients are strong where weights are small, as with features of different units, so the weights are stored more "
    "finely, as there is no metric: normalize the features, or give evaluate to know what checkpoints lose"
)
_SAMPLE = 1_024
"""Values of the sample of one tensor, at most."""
_ORDINARY = 0.5
"""The share of ``Σ F·w²`` that ``Σ v·w²`` is at least in nearly all trainings."""


def gradient_alignment(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], shards: Shards
) -> float:
    """Return by how much the limit of the estimate is multiplied, at most 1: ``Σ v·w² / Σ F·w²``, if that is small.

    The sums are those of matrices with a second moment v in an optimizer, on samples; without any, 1. Matrices that are
    exact because they are uneven do not count: gradients are zero where a mask is -10000. parameters: by name. shards:
    of them. Collective if there are any.
    """
    matrices = {name: each for name, each in parameters.items() if each.numel() > max(each.shape, default=0)}
    moments = {name: local_of(moment) for name, moment in second_moments(matrices, optimizers).items()}
    weights = {name: local_of(matrices[name]) for name in moments}
    own = {name: [0.0] * 4 for name in weights}  # a rank may hold nothing of a tensor
    own |= _sums(weights, {n: m for n, m in moments.items() if m.stride() == weights[n].stride()})
    sums = shards.sums(own)
    if (found := _aligned(sums.values())) < 1:
        uneven: list[str] = []
        magnitudes(weights, shards, uneven=uneven)
        found = _aligned(each for name, each in sums.items() if name not in uneven)
    return found


def _aligned(sums: Iterable[Sequence[float]]) -> float:
    found = np.array(list(sums)).reshape(-1, 4)
    together, squares, gradients, sizes = found[np.isfinite(found).all(1) & (found[:, 3] > 0)].T
    assumed = float((squares * gradients / sizes).sum())
    return min(1.0, float(together.sum()) / assumed / _ORDINARY) if 0 < assumed < math.inf else 1.0


def _sums(weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return ``Σ v·w²``, ``Σ w²``, ``Σ v`` and the number of values, by name, of tensors that have values and moments.

    The sums are those of a sample, times the values that one of the sample stands for.
    """
    of_weights, of_moments = (sampled_values(each, _SAMPLE) for each in (weights, moments))
    names = [name for name in of_weights if name in of_moments]
    if not names:
        return {}
    # One array for all: a model may have ten thousand parameters.
    w, v = (np.concatenate([of[name] for name in names]) for of in (of_weights, of_moments))
    lengths = np.array([len(of_weights[name]) for name in names])
    sizes = np.array([weights[name].numel() for name in names])
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values
        squared = np.square(w)
        sums = np.add.reduceat(np.stack([squared * v, squared, v]), np.cumsum(lengths) - lengths, axis=1)
        together = np.vstack([sums * (sizes / lengths), sizes])
    return dict(zip(names, together.T.tolist(), strict=True))
