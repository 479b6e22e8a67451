"""Checks a tensor that was quantized on a grid."""

import torch

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.tensors.codebook import PROTECTED, rung_value

FAR = 127.0
"""Values more than this many grid steps from zero are outliers."""


def assert_near(tensor, quantized, rung):
    """Assert errors of at most half a grid step, and for outliers those of 16 bits, in the tensor's dtype."""
    found = dequantize(quantized)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    exact, restored = tensor.detach().double().reshape(-1), found.double().reshape(-1)
    assert bool(restored.isfinite().all())
    step = float(rung_value(rung))
    rounding = exact.abs() * torch.finfo(torch.float32 if tensor.dtype == torch.float64 else tensor.dtype).eps
    off = (restored - exact).abs()
    near = exact.abs() <= (FAR + 0.499) * step
    assert bool((off[near] <= 0.5 * step + rounding[near]).all())
    half = torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16
    far = exact.abs() > (FAR + 0.501) * step
    largest = torch.finfo(half).max
    assert torch.equal(restored[far], exact[far].clamp(-largest, largest).float().to(half).double())
    levels = torch.from_numpy(quantized.levels)
    assert bool((levels[far] == PROTECTED).all())
    assert not bool((levels[near] == PROTECTED).any())
