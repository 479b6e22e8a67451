"""Displacement since the restore: how much of it, and so of the training since then, a checkpoint would keep.

After a restore, weights sit on the levels they were restored from. While they have moved little, quantizing takes most
of them back to these levels. A metric on held-out data may not show this, but a training that crashes again and again
would make no progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import QuantizedTensor

LEAST_KEPT = 0.8
"""Share of the displacement since a restore that a checkpoint must keep."""


def keeps_enough(share_kept: float | None) -> bool:
    """Return whether a checkpoint keeps enough of the displacement. None: nothing was restored."""
    return share_kept is None or share_kept >= LEAST_KEPT


class Displacement:
    """The displacement of weights since they were restored.

    weights: the weights in training, by name. restored: the quantized tensors that they were restored from, by name.
    Tensors of other names or shapes are ignored.
    """

    def __init__(self, weights: Mapping[str, Tensor], restored: Mapping[str, QuantizedTensor]) -> None:
        self._weights = weights
        self._restored = {n: r for n, r in restored.items() if n in weights and weights[n].shape == r.shape}

    def share_kept(self, quantized: Mapping[str, QuantizedTensor]) -> float | None:
        """Return the share of the displacement that quantized weights keep, from 0 to 1. None if nothing was restored.

        For one tensor this is ``⟨ŵ - r, w - r⟩ / ‖w - r‖²`` with restored ``r``, weights ``w`` and quantized weights
        ``ŵ``. It is 1 if ``ŵ`` equals ``w`` or differs from it only at right angles to the displacement, and 0 if ``ŵ``
        equals ``r``. The result is the mean over tensors, weighted by their numbers of elements, so that layers with
        small learning rates count too. It is 1 if no weight has moved.
        """
        if not self._restored:
            return None
        kept, counted = 0.0, 0
        for name, restored in self._restored.items():  # one at a time: all displacements are as large as the model
            device = self._weights[name].device
            origin = _flat(dequantize(restored, device))
            displacement = _flat(self._weights[name]) - origin
            squared_length = float(displacement @ displacement)
            if not 0 < squared_length < math.inf:
                continue
            projection = float((_flat(dequantize(quantized[name], device)) - origin) @ displacement)
            kept += displacement.numel() * min(max(projection / squared_length, 0.0), 1.0)
            counted += displacement.numel()
        return kept / counted if counted else 1.0


def _flat(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(wide).reshape(-1)
