"""How much of what training has done since a restore its next checkpoint would keep.

After a restore, weights sit on the levels they were restored from. While they have moved little, quantizing takes most
of them back there. A metric on held-out data hardly sees it: levels are an average of where weights have been lately,
and often score better than the weights themselves. A training that crashes again and again would get nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dynaquant.quantized import QuantizedTensor, dequantize


class Progress:
    """The way that weights have come since they were restored.

    weights: those of the model, by name. restored: what the weights among them that came from levels came from.
    """

    def __init__(self, weights: Mapping[str, Tensor], restored: Mapping[str, QuantizedTensor]) -> None:
        self._weights = weights
        self._restored = {n: r for n, r in restored.items() if n in weights and weights[n].shape == r.shape}
        ways = (_flat(weights[name]) - _flat(dequantize(origin)) for name, origin in self._restored.items())
        self._squared = sum(float(way @ way) for way in ways)

    def kept(self, quantized: Mapping[str, QuantizedTensor]) -> float:
        """The share of the way that quantized weights have come: ``⟨ŵ - r, w - r⟩ / ‖w - r‖²`` with restored ``r``.

        1 where they are the weights, or off them in any direction across the way; 0 where they are back at its
        beginning. All tensors count together. 1 when nothing has moved.
        """
        if not self._squared:
            return 1.0
        # One tensor at a time, as the ways of all of them would take more memory than the model.
        come = 0.0
        for name, origin in self._restored.items():
            begin = _flat(dequantize(origin))
            come += float((_flat(dequantize(quantized[name])) - begin) @ (_flat(self._weights[name]) - begin))
        return come / self._squared


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64).reshape(-1)
