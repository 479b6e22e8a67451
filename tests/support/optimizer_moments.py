"""Moments like those of an optimizer, and the effect of storing them on the next update."""

import math

import numpy as np
import torch

from dynaquant.engine.forms.form import dequantize

EPSILON = 1e-8
SLACK = 1.0001
"""Tolerances hold up to the precision of float32."""


def numbers(tensor):
    return tensor.detach().double().numpy()


def second_effect(second, stored):
    """Return the root mean square of ``sqrt(v / v̂) - 1`` over the elements that are not zero."""
    v, decoded = numbers(second), numbers(dequantize(stored))
    moved = v > 0
    with np.errstate(divide="ignore"):
        return float(np.sqrt(np.mean((np.sqrt(v[moved] / decoded[moved]) - 1) ** 2))) if moved.any() else 0.0


def first_effect(first, restored_first, restored_second):
    """Return the relative error of the next update with the restored second moment, whose roots are the weights."""
    root = np.sqrt(numbers(restored_second))
    wanted, found = (np.sqrt(root) * numbers(each) / (root + EPSILON) for each in (first, restored_first))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def moments(shape=(48, 40), seed=0, spread=1.5):
    """Return a first and a second moment like Adam's: rows and columns differ much, single elements a little."""
    random = np.random.default_rng(seed)
    rows, columns = random.normal(0, spread, shape[:1]), random.normal(0, spread, math.prod(shape[1:]))
    v = 1e-6 * np.exp(rows[:, None] + columns + random.normal(0, 0.3, (len(rows), len(columns))))
    m = random.normal(0, 0.4, v.shape) * np.sqrt(v)
    return torch.tensor(m.reshape(shape), dtype=torch.float32), torch.tensor(v.reshape(shape), dtype=torch.float32)
