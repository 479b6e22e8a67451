"""Boxes: what is cut out of a stored tensor, or joined, has the same values and levels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import bits

from dynaquant.quantize.bounds import quantize_bounded
from dynaquant.quantize.first_moment import quantize_first_moment
from dynaquant.quantize.grid import quantize
from dynaquant.quantize.log_grid import quantize_to_log_grid
from dynaquant.quantize.second_moment import quantize_rank_one
from dynaquant.state.bound import Bound
from dynaquant.state.roles import Label
from dynaquant.tensors.boxes import Box, cut, join
from dynaquant.tensors.codebook import Centres
from dynaquant.tensors.dequantize import values_of
from dynaquant.tensors.stored import QuantizedTensor, RoundedWeight, stored_equal

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def clusters(tensor):
    centres = Centres(np.array([-1.5, -0.5, 0.5, 1.5], dtype=np.float32))
    levels = (2 + (tensor.clamp(-2, 1.99) + 2).floor()).to(torch.uint8).numpy().reshape(-1)
    return QuantizedTensor(tensor.dtype, tensor.shape, levels, centres, np.zeros(0, np.uint16))


def in_units(tensor):
    second = quantize_to_log_grid(tensor.square() + 0.01, 4)
    return quantize_first_moment(tensor, second, "v", 0.2)


def with_a_bound(tensor):
    return quantize_bounded({"field": tensor}, {"field": Label("bound", bound=Bound(absolute=1e-3))})["field"]


def of_rank_one(tensor):
    return quantize_rank_one(tensor.square() + 0.01)


FORMS = {
    "exact": lambda tensor: tensor,
    "integers": lambda tensor: (tensor * 10).to(torch.int16),
    "on a grid": lambda tensor: quantize(tensor, -4),
    "with outliers": lambda tensor: quantize(tensor, -24),
    "in bfloat16": lambda tensor: quantize(tensor.bfloat16(), -8),
    "on a logarithmic grid": lambda tensor: quantize_to_log_grid(tensor.square(), 2),
    "clusters": clusters,
    "of rank one": of_rank_one,
    "in units": in_units,
    "rounded": lambda tensor: RoundedWeight(torch.bfloat16, quantize(tensor, -12), "master"),
    "with a bound": lambda tensor: with_a_bound(torch.where(tensor > 2, math.inf, tensor)),
}


def random_tensor(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


@st.composite
def partitions(draw, shape):
    """Cut a tensor's box again and again, at random places."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[d]))
        left, right = list(box.sizes), list(box.sizes)
        left[d], right[d] = at, box.sizes[d] - at
        offsets = list(box.offsets)
        offsets[d] += at
        boxes += [Box(box.offsets, tuple(left)), Box(tuple(offsets), tuple(right))]
    return draw(st.permutations(boxes))


@pytest.mark.parametrize("form", FORMS)
@given(st.data())
def test_cutting_and_joining_change_nothing(form, data):
    shape = data.draw(SHAPES)
    if form == "of rank one" and len(shape) < 2:
        shape = [*shape, 3]
    stored = FORMS[form](random_tensor(shape, data.draw(st.integers(0, 99))))
    boxes = data.draw(partitions(shape))
    parts = [(box, cut(stored, box)) for box in boxes]
    values = values_of(stored)
    for box, part in parts:
        assert part.shape == box.sizes
        assert bits(values_of(part)) == bits(values[box.slices].contiguous())
    joined = join(stored.dtype, torch.Size(shape), parts)
    assert bits(values_of(joined)) == bits(values)
    if not isinstance(stored, torch.Tensor | RoundedWeight):
        assert stored_equal(joined, stored)


@given(st.data())
def test_parts_that_were_quantized_apart_on_the_same_steps_are_joined_as_levels(data):
    shape = data.draw(SHAPES)
    tensor = random_tensor(shape, 1) * random_tensor(shape, 2).exp()
    boxes = data.draw(partitions(shape))
    for quantizer in (lambda t: quantize(t, -6), lambda t: quantize_to_log_grid(t.square(), 4)):
        whole = quantizer(tensor)
        joined = join(tensor.dtype, tensor.shape, [(box, quantizer(tensor[box.slices])) for box in boxes])
        assert isinstance(joined, QuantizedTensor)
        assert bits(values_of(joined)) == bits(values_of(whole))
        assert stored_equal(joined, whole)


def test_parts_on_different_steps_are_joined_as_values():
    tensor = random_tensor((6, 4), 1)
    top, bottom = Box((0, 0), (3, 4)), Box((3, 0), (3, 4))
    parts = [(top, quantize(tensor[:3], -4)), (bottom, quantize(tensor[3:], -5))]
    joined = join(torch.float32, torch.Size([6, 4]), parts)
    assert isinstance(joined, torch.Tensor)
    assert bits(joined) == bits(torch.cat([values_of(stored) for _, stored in parts]))


def test_rank_one_parts_with_other_rows_are_joined_as_values():
    tensor = random_tensor((6, 8), 1).square()
    left, right = Box((0, 0), (6, 4)), Box((0, 4), (6, 4))
    parts = [(left, quantize_rank_one(tensor[:, :4])), (right, quantize_rank_one(tensor[:, 4:] * 9))]
    joined = join(torch.float32, torch.Size([6, 8]), parts)
    assert isinstance(joined, torch.Tensor)
    assert bits(joined) == bits(torch.cat([values_of(stored) for _, stored in parts], 1))


def test_boxes_that_overlap_may_be_joined():
    tensor = quantize(random_tensor((6, 4), 1), -4)
    boxes = [Box((0, 0), (4, 4)), Box((2, 0), (4, 3)), Box((3, 2), (3, 2))]
    assert stored_equal(join(torch.float32, torch.Size([6, 4]), [(box, cut(tensor, box)) for box in boxes]), tensor)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (6, 3))], "do not cover"),
        ([Box((0, 0), (3, 4)), Box((0, 0), (3, 4))], "do not cover"),
        ([], "do not cover"),
    ],
    ids=["a column is missing", "rows are missing", "nothing"],
)
def test_boxes_that_do_not_cover_the_tensor_are_refused(boxes, message):
    tensor = random_tensor((6, 4), 1)
    with pytest.raises(ValueError, match=message):
        join(torch.float32, torch.Size([6, 4]), [(box, cut(tensor, box)) for box in boxes])


@pytest.mark.parametrize(
    "part",
    [
        (Box((0, 0), (6, 4)), torch.zeros(6, 3)),
        (Box((0, 0), (6, 4)), torch.zeros(6, 4, dtype=torch.float16)),
        (Box((1, 0), (6, 4)), torch.zeros(6, 4)),
        (Box((0,), (6,)), torch.zeros(6)),
    ],
    ids=["shape", "dtype", "outside", "dimensions"],
)
def test_parts_that_do_not_fit_their_box_are_refused(part):
    with pytest.raises(ValueError, match="does not fit its box"):
        join(torch.float32, torch.Size([6, 4]), [part])


def test_tensors_without_elements_and_without_dimensions_can_be_cut_and_joined():
    scalar = torch.tensor(3.0)
    assert join(torch.float32, torch.Size([]), [(Box((), ()), cut(scalar, Box((), ())))]) is scalar
    empty = torch.empty(0, 4)
    assert join(torch.float32, empty.shape, []).shape == (0, 4)
    rows = Box((2, 0), (0, 4))
    assert cut(torch.zeros(5, 4), rows).shape == (0, 4)
    assert values_of(cut(quantize(torch.zeros(5, 4), 0), rows)).shape == (0, 4)


def test_overlaps_of_boxes():
    box = Box((2, 0), (3, 4))
    assert box.overlap(Box((4, 3), (5, 5))) == Box((4, 3), (1, 1))
    assert box.overlap(Box((5, 0), (1, 4))) is None
    assert Box((4, 3), (1, 1)).relative_to(box) == Box((2, 3), (1, 1))
    assert box.elements == 12
