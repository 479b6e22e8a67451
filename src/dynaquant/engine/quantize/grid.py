"""Quantize one tensor on a uniform grid (method 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.form import dequantize, piece_length, pieces
from dynaquant.engine.forms.levels import NO_OUTLIERS, QuantizedTensor, protected_values
from dynaquant.engine.kernels.host import grid_levels_and_errors
from dynaquant.engine.tensors.codebook import FIRST_BIN, MAX_BINS, Grid, inverse_step, rung_value
from dynaquant.engine.tensors.shard import Shard


def quantize(tensor: Tensor, rung: int, seed: int | None = None, shard: Shard | None = None) -> QuantizedTensor:
    """Round every value to a multiple of the grid step. Values beyond 127 steps are protected (kept in 16 bits).

    tensor: float32, float64, bfloat16 or float16, finite, any shape, on any device. rung: index of the grid step.
    seed: None rounds to the nearest multiple. A number selects stochastic rounding: the probability of the multiple
    above is the distance from the multiple below, in steps, so the result is right on average. shard: says which
    elements of a tensor these are, if they are a part of it. A value is rounded alike in whatever part it is.
    """
    return begin_quantize(tensor, rung, seed, shard)()


def begin_quantize(
    tensor: Tensor, rung: int, seed: int | None = None, shard: Shard | None = None
) -> Callable[[], QuantizedTensor]:
    """Start ``quantize`` and return a function that finishes it. A device works on in between."""
    return _begun(tensor, rung, *_levels(tensor, rung, seed, shard))


def _begun(tensor: Tensor, rung: int, levels: Tensor, highest: Callable[[], int]) -> Callable[[], QuantizedTensor]:
    """Return a function that waits for levels and returns the quantized tensor. highest: returns the highest level."""
    copied = kernels.to_host(levels)

    def finish() -> QuantizedTensor:
        wanted = highest() - FIRST_BIN + 1
        protected = protected_values(tensor, levels) if wanted > MAX_BINS else NO_OUTLIERS
        bins = min(max(wanted, 0), MAX_BINS)
        return QuantizedTensor(tensor.dtype, tensor.shape, copied(), Grid(rung, bins), protected)

    return finish


def _levels(tensor: Tensor, rung: int, seed: int | None, shard: Shard | None) -> tuple[Tensor, Callable[[], int]]:
    """Return the levels, and a function that waits for the highest one."""
    kernel, inverse = kernels.for_device(tensor.device), inverse_step(rung)
    if seed is None or shard is None or not tensor.numel():
        return kernel.grid_levels(tensor, inverse, seed)
    flat = tensor.detach().reshape(-1)
    found = [kernel.grid_levels(flat[at : at + size], inverse, seed, first) for at, first, size in shard.runs]
    waits = [highest for _, highest in found]  # without the levels, which would be kept twice
    return torch.cat([levels for levels, _ in found]), lambda: max(highest() for highest in waits)


Empty = Callable[[torch.Size, torch.dtype, torch.device], Tensor]
"""Makes a tensor on a device, not initialized."""


@dataclass(frozen=True, eq=False)
class RoundedToGrid:
    """A tensor as a grid would store it, to be scored: its values are computed on request.

    Values are the same, bit for bit, as those of the quantized tensor. float32 takes one pass over the tensor; other
    dtypes are quantized first.

    read: returns the tensor, float32, float64, bfloat16 or float16. rung, seed, shard: see ``quantize``. keeps_levels:
    whether ``errors`` may make the levels and keep them.
    """

    read: Callable[[], Tensor]
    rung: int
    seed: int | None
    shard: Shard | None = None
    keeps_levels: bool = False
    _made: list[Callable[[], QuantizedTensor]] = field(default_factory=list)

    @property
    def has_levels(self) -> bool:
        """Whether ``errors`` has made the levels already."""
        return bool(self._made)

    def begin_quantize(self) -> Callable[[], QuantizedTensor]:
        """Start to quantize the tensor. Return a function that finishes it."""
        return self._made[0] if self._made else begin_quantize(self.read(), self.rung, self.seed, self.shard)

    def values(self, empty: Empty = kernels.empty) -> Tensor:
        """Return the values, on the tensor's device. empty: makes the memory for them."""
        tensor = self.read()
        if tensor.dtype != torch.float32:
            return dequantize(quantize(tensor, self.rung, self.seed, self.shard), tensor.device)
        values = empty(tensor.shape, tensor.dtype, tensor.device)
        self._round(tensor, 0, values)
        return values

    def pieces(self) -> Iterator[Tensor]:
        """Yield the values as ``pieces`` of the quantized tensor does, on the tensor's device."""
        tensor = self.read()
        if tensor.dtype != torch.float32:
            yield from pieces(quantize(tensor, self.rung, self.seed, self.shard), tensor.device)
            return
        flat, length = tensor.detach().reshape(-1), piece_length(tensor.shape, tensor.device)
        for begin in range(0, flat.numel(), length):
            part = flat[begin : begin + length]
            values = kernels.empty(part.shape, part.dtype, part.device)
            self._round(part, begin, values)
            yield values

    def errors(self, exact: Tensor) -> tuple[float, float] | None:
        """Return the sum of the squares of exact values, and that of the errors; None if that takes the values.

        exact: the tensor that is rounded, and float32; then values are not kept. None for any other. With
        ``keeps_levels``, a whole tensor in host memory gets its levels in the same pass.
        """
        tensor = self.read()
        if tensor is not exact or tensor.dtype != torch.float32:
            return None
        inverse, step = inverse_step(self.rung), float(rung_value(self.rung))
        if self.keeps_levels and tensor.is_cpu and self.shard is None:
            levels, highest, found = grid_levels_and_errors(tensor, inverse, step, self.seed)
            self._made[:] = [_begun(tensor, self.rung, levels, lambda: highest)]
            return found
        grid_errors = kernels.for_device(tensor.device).grid_errors
        if self.seed is None or self.shard is None:
            return grid_errors(tensor, inverse, step, self.seed, 0)
        flat = tensor.detach().reshape(-1)
        runs = self.shard.runs if len(flat) else []
        sums = [grid_errors(flat[at : at + size], inverse, step, self.seed, first) for at, first, size in runs]
        return sum(squares for squares, _ in sums), sum(errors for _, errors in sums)

    def _round(self, values: Tensor, begin: int, out: Tensor) -> None:
        """Round some values. begin: index of the first one in this part of the tensor."""
        grid_values = kernels.for_device(values.device).grid_values
        inverse, step = inverse_step(self.rung), float(rung_value(self.rung))
        if self.seed is None or self.shard is None:
            grid_values(values, inverse, step, self.seed, begin, out)
            return
        flat, flat_out = values.detach().reshape(-1), out.view(-1)
        for at, first, size in self.shard.runs:
            low, high = max(at - begin, 0), min(at + size - begin, len(flat))
            if low < high:
                grid_values(flat[low:high], inverse, step, self.seed, first + begin + low - at, flat_out[low:high])
