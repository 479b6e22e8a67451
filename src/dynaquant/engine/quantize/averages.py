"""How precisely averages of weights are stored, as far as no metric judges them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dynaquant.engine.bound import Bound
from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.engine.shards import WHOLE, Shards


def average_bounds(averages: Mapping[str, Tensor], share: float, shards: Shards = WHOLE) -> dict[str, Bound]:
    """Return the largest error of each average of weights, by name: a share of its small values.

    Averages that a grid cannot hold are left out, and stored exactly (``magnitudes``). Collective with shards.

    averages: of ``QUANTIZABLE_DTYPES``. share: of ``Magnitude.small``.
    """
    return {name: Bound(absolute=share * found.small) for name, found in magnitudes(averages, shards).items()}
