"""One tensor on a logarithmic grid: errors, range and layouts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_moments import numbers
from training import bits
from whole_tensors import quantize_to_log_grid

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.tensors.codebook import LogGrid
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES


@given(
    exponents=st.lists(st.floats(-100, 100) | st.none(), max_size=40),
    pace=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_errors_on_a_log_grid_are_at_most_half_a_pace_and_zero_stays_zero(exponents, pace):
    tensor = torch.tensor([0.0 if e is None else 2.0**e for e in exponents])
    stored = quantize_to_log_grid(tensor, pace)
    positive = tensor > 0
    rungs = 4 * np.log2(numbers(tensor[positive]))
    if stored is None:
        assert np.ptp(rungs / pace) > 252
        return
    restored = dequantize(stored)
    assert torch.equal(restored > 0, positive)
    off = np.abs(4 * np.log2(numbers(restored[positive])) - rungs)
    # A bucket is 0.4 % wide on either side, 0.023 rungs. Its position is a multiple of a sixteenth of a rung.
    assert off.max(initial=0) <= pace / 2 + 0.023 + 1 / 32


def test_a_log_grid_spans_from_the_smallest_to_the_largest_value():
    stored = quantize_to_log_grid(torch.tensor([0.0, 0.25, 16.0, 1.0]), 4)
    assert stored.codebook == LogGrid(4, -2, 7)
    assert stored.levels.tolist() == [0, 2, 8, 4]
    assert [(each.level, each.value) for each in stored.level_counts()] == [
        *(("0", 0.0), ("2^-2", 0.25), ("2^0", 1.0), ("2^4", 16.0))
    ]


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_a_log_grid_works_for_any_dtype_and_shape(dtype):
    for shape in [(), (1,), (0,), (3, 4), (2, 3, 4)]:
        tensor = torch.rand(shape).to(dtype)
        restored = dequantize(quantize_to_log_grid(tensor, 2))
        assert (restored.dtype, restored.shape) == (dtype, tensor.shape)
        assert torch.all((restored / tensor).log2().abs() <= 0.27) or tensor.numel() == 0
    transposed = torch.rand(5, 7).t()
    assert bits(dequantize(quantize_to_log_grid(transposed, 2))) == bits(
        dequantize(quantize_to_log_grid(transposed.contiguous(), 2))
    )
