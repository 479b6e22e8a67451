"""How much of what training has done since a restore its next checkpoint would keep.

After a restore, weights sit on the levels they were restored from. While they have moved little, quantizing takes most
of them back there, which a metric on held-out data need not show. A training that crashes again and again would get
nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import QuantizedTensor


class Progress:
    """The way that weights have come since they were restored.

    weights: what is to be quantized, by name. restored: the quantized tensors that weights were restored from, by name;
    those of other names and shapes say nothing.
    """

    def __init__(self, weights: Mapping[str, Tensor], restored: Mapping[str, QuantizedTensor]) -> None:
        self._weights = weights
        self._restored = {n: r for n, r in restored.items() if n in weights and weights[n].shape == r.shape}

    def __bool__(self) -> bool:
        """Whether there is a way to speak of."""
        return bool(self._restored)

    def kept(self, quantized: Mapping[str, QuantizedTensor]) -> float:
        """The share of the way that quantized weights have come, from 0 to 1.

        Of a tensor it is ``⟨ŵ - r, w - r⟩ / ‖w - r‖²`` with restored ``r``: 1 where ``ŵ`` are the weights, or off them
        in any direction across the way; 0 where they are back at its beginning. Then the mean over tensors by their
        number of elements, so that layers with small learning rates count too. 1 when nothing has moved.
        """
        kept, counted = 0.0, 0
        for name, origin in self._restored.items():  # one at a time: all ways together are as large as the model
            where = self._weights[name].device
            begin = _flat(dequantize(origin, where))
            way = _flat(self._weights[name]) - begin
            squared = float(way @ way)
            if not 0 < squared < math.inf:
                continue
            come = float((_flat(dequantize(quantized[name], where)) - begin) @ way)
            kept += way.numel() * min(max(come / squared, 0.0), 1.0)
            counted += way.numel()
        return kept / counted if counted else 1.0


def _flat(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(wide).reshape(-1)
