"""Streams of tensors: exact for every dtype and layout, with the same hash as the tensor."""

import numpy as np
import pytest
import torch

from dynaquant.engine.forms.form import Coded
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.schemes import BytePlanes, Conditional, Lossless, Raw, Rearranged
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.quantize.kmeans import quantize
from dynaquant.engine.quantize.partition import thresholds
from dynaquant.engine.tensors.dtypes import DTYPES
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.engine.tensors.log_histogram import LogHistogram
from dynaquant.state.flatten import flatten


def round_trip(tensor):
    scheme, stream = encode(tensor, None)
    back = decode(scheme, Coded(tensor.dtype, tensor.shape, stream, None))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert tensor_hash(back) == tensor_hash(tensor)
    return back, scheme, stream


@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [0, 6, 6000])
def test_tensors_of_every_dtype_come_back(name, size):
    data = torch.arange(size * DTYPES[name].itemsize).remainder(2).to(torch.uint8)
    back, scheme, stream = round_trip(data.view(DTYPES[name]))
    assert torch.equal(back.view(torch.uint8), data)
    assert isinstance(scheme, Raw) or len(stream) < data.numel()
    if size == 6000:
        assert isinstance(scheme, Lossless | BytePlanes)
        assert len(stream) < data.numel() / 5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(10, 10)[::3, 1::2],
        torch.randn(1, 7).expand(5, 7),
        torch.tensor(2.5),
        torch.ones(()).expand(1),
        torch.ones(1).expand(0),
        torch.zeros(0, 3),
        *flatten([np.zeros(0), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3).T])[1].values(),
    ],
    ids=lambda tensor: f"{list(tensor.shape)}, strides {tensor.stride()}",
)
def test_tensors_of_any_layout_survive_a_round_trip(tensor):
    assert torch.equal(round_trip(tensor)[0], tensor)


def test_the_hash_depends_on_values_shape_and_dtype_but_not_on_the_layout():
    tensor = torch.zeros(4, 2)
    others = [tensor.reshape(2, 4), tensor.to(torch.int32), -tensor, tensor[:2], torch.ones(4, 2)]
    assert len({tensor_hash(other) for other in [tensor, *others]}) == 6
    assert tensor_hash(torch.arange(6.0).reshape(2, 3).t()) == tensor_hash(
        torch.arange(6.0).reshape(2, 3).t().contiguous()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("has_parent", [True, False])
@pytest.mark.parametrize(("coder", "kind"), [("conditional", Conditional), ("rearranged", Rearranged)])
def test_quantized_tensors_survive_a_round_trip(dtype, has_parent, coder, kind):
    def quantized(tensor, bins):
        histogram = LogHistogram.of(tensor)
        return quantize(tensor, histogram, bins, thresholds(histogram, 0.1, 0.01))

    before = torch.randn(60, 70).to(dtype)
    stored = quantized(before + 0.01 * torch.randn(60, 70).to(dtype), 6)
    parent = quantized(before, 16) if has_parent else None
    scheme, stream = encode(stored, parent, coder)
    assert isinstance(scheme, kind)
    assert scheme.needs_parent == has_parent
    back = decode(scheme, Coded(stored.dtype, stored.shape, stream, parent))
    assert torch.equal(values_of(back), values_of(stored))
    assert np.array_equal(back.levels, stored.levels)
    if has_parent:
        with pytest.raises(ValueError, match="parent has no levels"):
            decode(scheme, Coded(stored.dtype, stored.shape, stream, None))


@pytest.mark.parametrize("coder", ["conditional", "rearranged"])
def test_a_parent_of_another_size_is_not_used(coder):
    tensor = torch.randn(10_000)
    stored, longer = (quantize(values, LogHistogram.of(values), 4) for values in (tensor, tensor.repeat(2)))
    assert encode(stored, stored, coder)[0].needs_parent
    scheme, _ = encode(stored, longer, coder)
    assert not scheme.needs_parent


def test_a_bool_that_is_neither_0_nor_1_is_refused():
    tensor = torch.tensor([True, False])
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        decode(Raw(), Coded(tensor.dtype, tensor.shape, b"\x01\x02", None))
