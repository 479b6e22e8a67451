"""Quantize moments of small tensors, each in one native call (method 2.3).

The decisions are those of ``second_moment`` and ``first_moment``, which serve all other tensors: large ones, those of
other dtypes, on devices, and of sharded trainings. There, one moment takes some fifteen calls. In a checkpoint of a
thousand small tensors, nothing else would take as long.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.forms.levels import NO_OUTLIERS, QuantizedTensor
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.kernels.host import plain_values
from dynaquant.engine.quantize.epsilon import Epsilon
from dynaquant.engine.quantize.first_moment import inverses, rungs, units_of_levels
from dynaquant.engine.quantize.log_grid import positions
from dynaquant.engine.quantize.moment_sample import SAMPLE_SIZE
from dynaquant.engine.quantize.second_moment import FINEST_RANK_ONE, RANK_ONE_SHARE, SECOND_PACES, factor
from dynaquant.engine.tensors.codebook import LogGrid


def small_values(tensor: Tensor) -> NDArray[np.float32] | None:
    """Return the values of a tensor for this module: float32, on the host, and all of it would be the sample."""
    return plain_values(tensor) if 0 < tensor.numel() <= SAMPLE_SIZE else None


def quantize_small_second_moment(
    values: NDArray[np.float32], shape: torch.Size, tolerance: float, epsilon: Epsilon
) -> QuantizedTensor | RankOne | None:
    """Do what ``quantize_second_moment`` does. None also stands for values that are not finite, or negative."""
    of_rank_one = RANK_ONE_SHARE * tolerance
    of_rank_one = of_rank_one if of_rank_one >= FINEST_RANK_ONE else 0.0  # not tried
    height = shape[0] if len(shape) > 1 else 0
    levels = np.empty(len(values), dtype=np.uint8)
    rows, columns = np.empty(height, dtype=np.uint8), np.empty(len(levels) // height if height else 0, dtype=np.uint8)
    found = _native_moments().second(values, tolerance, of_rank_one, epsilon.negligible, rows, columns, levels)
    if found is None:
        return None
    head, bins = found
    if isinstance(head, int):
        return QuantizedTensor(torch.float32, shape, levels, LogGrid(head, *bins), NO_OUTLIERS)
    return RankOne(torch.float32, shape, factor(head, rows), factor(bins, columns))


def quantize_small_first_moment(
    values: NDArray[np.float32],
    stored_second: QuantizedTensor | RankOne,
    second_name: str,
    tolerance: float,
    epsilon: Epsilon,
) -> ScaledMoment | None:
    """Do what ``quantize_first_moment`` does. None also stands for values that are not finite.

    tolerance: finite. stored_second: what ``quantize_small_second_moment`` returned.
    """
    levels = np.empty(len(values), dtype=np.uint8)
    one = stored_second
    rows, columns = (one.rows, one.columns) if isinstance(one, RankOne) else (one, None)
    grid = cast(LogGrid, rows.codebook)
    found = _native_moments().first(
        values,
        rows.levels,
        grid.first,
        None if columns is None else columns.levels,
        0 if columns is None else cast(LogGrid, columns.codebook).first,
        grid.pace,
        tolerance,
        epsilon.assumed,
        epsilon.zero,
        levels,
    )
    if found is None:
        return None
    decoded, highest = found
    first = torch.from_numpy(values).view(stored_second.shape)
    units = units_of_levels(torch.from_numpy(levels), highest, first, stored_second, decoded)
    return ScaledMoment(torch.float32, units, stored_second, second_name)


@cache
def _native_moments() -> _native.SmallMoments:
    return _native.SmallMoments(positions(), list(SECOND_PACES), rungs(0), inverses(0))
