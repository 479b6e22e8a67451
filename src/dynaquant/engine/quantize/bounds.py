"""Quantize tensors with a bound on every value's error: the user's, or that of averages of weights.

No metric decides, and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.bound import Bound
from dynaquant.engine.coding.prediction import Integers
from dynaquant.engine.forms.bounded import BoundedTensor, filled, level_dtype, nearest_levels, on_grid
from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.engine.reduction import Numbers, Reduction, run_in_windows, total
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES, bytes_of
from dynaquant.engine.tensors.shard import Shard

PIECE = 1 << 15
"""Values that are quantized at once. They stay in the processor's cache."""
MOST_EXACT = 0.25
"""The largest share of a tensor's finite values that may be stored exactly beside the levels. If more have to be, the
bound is close to the precision of the dtype, and the whole tensor is stored exactly."""


def average_bounds(averages: Mapping[str, Tensor], share: float, shards: Shards = WHOLE) -> dict[str, Bound]:
    """Return the largest error of each average of weights, by name: a share of its small values.

    Averages that a grid cannot hold are left out, and stored exactly (``magnitudes``). Collective with shards.

    averages: of ``QUANTIZABLE_DTYPES``. share: of ``Magnitude.small``.
    """
    return {name: Bound(absolute=share * found.small) for name, found in magnitudes(averages, shards).items()}


def quantize_bounded(
    tensors: Mapping[str, Tensor],
    bounds: Mapping[str, Bound],
    shards: Shards = WHOLE,
) -> dict[str, BoundedTensor]:
    """Return the tensors that have a bound, by name. Those that must be stored exactly are left out.

    tensors: of more names than ``bounds``, perhaps. shards: of a sharded training, as for ``quantize_moments``.
    """

    def start(name: str) -> Reduction[BoundedTensor | None]:
        return within(tensors[name], bounds[name], shards.of(name, tensors[name]))

    found = run_in_windows(bounds, start, lambda name: tensors[name].numel(), shards.reduce)
    return {name: quantized for name, quantized in found.items() if quantized is not None}


def within(tensor: Tensor, bound: Bound, shard: Shard) -> Reduction[BoundedTensor | None]:
    """Return a tensor on a grid, every finite value within the bound. None if it must be stored exactly.

    shard: what the tensor is of the whole one. The whole one's range decides about the grid. Only the levels of
    values that are stored exactly, which count for nothing, depend on the shard.
    """
    if tensor.dtype not in QUANTIZABLE_DTYPES or not shard.shape.numel():
        return None
    values = tensor.detach().cpu().reshape(-1)
    lowest, highest = _range(values)
    reduced = (yield Numbers(highest=np.array([-lowest, highest]))).highest
    lowest, highest = -float(reduced[0]), float(reduced[1])
    if not lowest <= highest:
        return None
    allowed = bound.of_range(lowest, highest)
    step = grid_step(allowed, max(-lowest, highest), tensor.dtype) if allowed > 0 else None
    if step is None:
        return None
    levels, where = _levels(values, step, allowed)
    exact = values[torch.from_numpy(where)]
    finite_exact, finite = yield from total(int(exact.isfinite().sum()), int(values.isfinite().sum()))
    if finite_exact > MOST_EXACT * finite:
        return None
    return BoundedTensor(tensor.dtype, tensor.shape, step, allowed, levels, where, bytes_of(exact))


def _levels(values: Tensor, step: float, allowed: float) -> tuple[Integers, NDArray[np.int64]]:
    """Return the levels of values, and the positions of those that must be stored exactly."""
    levels = np.empty(values.numel(), dtype=level_dtype(values.dtype))
    positions: list[NDArray[np.int64]] = []
    last = 0.0
    for begin in range(0, len(levels), PIECE):
        piece = values[begin : begin + PIECE]
        found = nearest_levels(piece, step, values.dtype)
        if len(beyond := _beyond(piece, found, step, allowed)):
            found[beyond] = np.nan
            positions.append(begin + beyond)
            found[0] = last if np.isnan(found[0]) else found[0]  # the level before this piece
            filled(found)
        levels[begin : begin + PIECE] = found
        last = found[-1]
    return levels, np.concatenate(positions) if positions else np.empty(0, dtype=np.int64)


def grid_step(bound: float, largest: float, dtype: torch.dtype) -> float | None:
    """Return the step of a grid on which rounding keeps the bound; None if there is none.

    largest: the largest magnitude. Half a step and the rounding to the dtype must stay within the bound together. If
    the rounding would take more than a quarter of it, the step is a power of two: then a multiple either has few enough
    bits for the dtype, or is the value itself.
    """
    whole = min(2 * bound, 2.0**1023)
    smallest = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny
    rounding = math.ldexp(torch.finfo(dtype).eps, math.frexp(min(largest + bound, 2.0**1023))[1] - 1)
    if dtype != torch.float64:
        rounding /= 2  # the product of level and step is exact, or nearly so
    step = whole - 2 * rounding if rounding <= bound / 4 else math.ldexp(1.0, math.frexp(whole)[1] - 1)
    return step if step >= smallest else None  # smaller numbers are zero on some processors


def _range(values: Tensor) -> tuple[float, float]:
    """Return the lowest and highest finite value; infinity and minus infinity if there is none."""
    if not len(values):
        return math.inf, -math.inf
    lowest, highest = (float(extreme) for extreme in torch.aminmax(values))
    if math.isfinite(lowest) and math.isfinite(highest):
        return lowest, highest
    return _range(values[values.isfinite()])


def _beyond(values: Tensor, levels: NDArray[np.float64], step: float, bound: float) -> NDArray[np.int64]:
    """Return the positions of the values that are not within the bound on the grid."""
    decoded = on_grid(levels, step, values.dtype).to(torch.float64).numpy()
    originals = values.to(torch.float64).numpy()
    with np.errstate(all="ignore"):
        errors = np.abs(originals - decoded)
        kept = errors < bound
        if not kept.all():
            # The difference is rounded. Where it equals the bound, what was lost decides (Knuth's exact sum).
            at = np.flatnonzero(errors == bound)
            large, small = originals[at], -decoded[at]
            total = large + small
            part = total - large
            lost = (large - (total - part)) + (small - part)
            kept[at] = np.sign(lost) * np.sign(total) <= 0
    return np.flatnonzero(~kept)
