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

from dynaquant.engine.forms import form
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.candidate import CandidateTensor, CandidateWeights, pieces
from dynaquant.engine.shards import WHOLE, Shards

LEAST_KEPT = 0.99
"""Share of the displacement since a restore that a checkpoint must keep. The rest is lost at every restore,
even if no metric shows it."""


def keeps_enough(share_kept: float | None) -> bool:
    """Return whether a checkpoint keeps enough of the displacement. None: nothing was restored."""
    return share_kept is None or share_kept >= LEAST_KEPT


class Displacement:
    """The displacement of weights since they were restored. Created and used collectively if there are shards.

    weights: the weights in training, by name. restored: the quantized tensors that they were restored from, by name.
    Tensors of other names or shapes are ignored. shards: of the weights. A rank that holds nothing of a tensor has
    nothing restored of it; the tensor counts all the same.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], restored: Mapping[str, QuantizedTensor], shards: Shards = WHOLE
    ) -> None:
        self._weights, self._shards = weights, shards
        self._restored = {n: r for n, r in restored.items() if n in weights and weights[n].shape == r.shape}
        self._names = [*self._restored]
        if shards.divided:  # all ranks must count the same tensors
            lacking = shards.any({n: n not in self._restored and weights[n].numel() > 0 for n in weights})
            self._names = [name for name, lacks in lacking.items() if not lacks]

    @property
    def divided(self) -> bool:
        """Whether ``share_kept`` is collective."""
        return self._shards.divided

    @property
    def matters(self) -> bool:
        """Whether weights were restored and have not yet moved far enough from there."""
        return bool(self._names)

    def share_kept(self, candidate: CandidateWeights) -> float | None:
        """Return the share of the displacement that a candidate keeps, from 0 to 1. None if nothing was restored.

        For one tensor this is ``⟨ŵ - r, w - r⟩ / ‖w - r‖²`` with restored ``r``, weights ``w`` and the candidate's
        weights ``ŵ``. It is 1 if ``ŵ`` equals ``w`` or differs from it only at right angles to the displacement, and 0
        if ``ŵ`` equals ``r``. The result is the mean over tensors, weighted by their numbers of elements, so that
        layers with small learning rates count too. It is 1 if no weight has moved. Collective if there are shards.
        """
        if not self._names:
            return None
        kept, counted = 0.0, 0
        parts = {
            name: _projection(self._weights[name], self._restored[name], candidate[name])
            if name in self._restored and name in candidate  # an exact tensor is in no candidate
            else (0.0, 0.0)
            for name in self._names
        }
        for name, (projection, squared_length) in self._shards.sums(parts).items():
            if 0 < squared_length < math.inf:
                size = self._shards.size(name, self._weights[name])
                kept += size * min(max(projection / squared_length, 0.0), 1.0)
                counted += size
        return kept / counted if counted else 1.0


def _projection(weight: Tensor, restored: QuantizedTensor, candidate: CandidateTensor) -> tuple[float, float]:
    """Return ``⟨ŵ - r, w - r⟩`` and ``‖w - r‖²`` of one tensor. Works in pieces, to need little memory."""
    flat, begin = weight.detach().reshape(-1), 0
    projection = squared_length = 0.0
    pieces_of_both = zip(form.pieces(restored, weight.device), pieces(candidate, weight.device), strict=True)
    for restored_piece, candidate_piece in pieces_of_both:
        origin = _wide(restored_piece)
        displacement = _wide(flat[begin : begin + len(origin)]) - origin
        begin += len(origin)
        squared_length += float(displacement @ displacement)
        projection += float((_wide(candidate_piece) - origin) @ displacement)
    return projection, squared_length


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
