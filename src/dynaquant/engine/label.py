"""The label of a tensor: its role, and the type of its layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynaquant.engine.bound import Bound

Role = Literal["weight", "average", "first_moment", "second_moment", "buffer", "exact", "omit", "bound"]
"""What a tensor is. Weights are quantized; so are averages of weights, on fine grids, and moments, unless they must
stay exact. An omitted tensor is not stored, only its hash. The values of a tensor of role ``bound`` keep to a
``Bound``. All others are stored exactly."""


@dataclass(frozen=True)
class Label:
    """Role and layer type. Tensors of one layer type share thresholds; outside modules the layer type is ``""``.

    bound: the user's, of a live tensor of role ``bound``. Files do not have it.
    """

    role: Role
    layer_type: str = ""
    bound: Bound | None = None
