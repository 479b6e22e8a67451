"""Boxes: what is cut out of a stored tensor, or joined, has the same values and levels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import bits
from whole_tensors import quantize_first_moment, quantize_rank_one, quantize_to_log_grid

from dynaquant.engine.bound import Bound
from dynaquant.engine.forms.form import stored_equal
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.patchwork import patchwork
from dynaquant.engine.forms.rounded import RoundedWeight
from dynaquant.engine.forms.stored import cut, in_one, values_of
from dynaquant.engine.quantize.bounds import quantize_bounded
from dynaquant.engine.quantize.grid import quantize
from dynaquant.engine.tensors.box import Box, tile
from dynaquant.engine.tensors.codebook import Centres

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def clusters(tensor):
    centres = Centres(np.array([-1.5, -0.5, 0.5, 1.5], dtype=np.float32))
    levels = (2 + (tensor.clamp(-2, 1.99) + 2).floor()).to(torch.uint8).numpy().reshape(-1)
    return QuantizedTensor(tensor.dtype, tensor.shape, levels, centres, np.zeros(0, np.uint16))


def in_units(tensor):
    second = quantize_to_log_grid(tensor.square() + 0.01, 4)
    return quantize_first_moment(tensor, second, "v", 0.2)


def with_a_bound(tensor):
    return quantize_bounded({"field": tensor}, {"field": Bound(absolute=1e-3)})["field"]


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


@st.composite
def boxes_in(draw, shape):
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Box(tuple(offsets), tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)))


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
    together = patchwork(stored.dtype, torch.Size(shape), parts)
    assert bits(values_of(together)) == bits(values)
    assert all(stored_equal(cut(together, box), part) for box, part in parts if box.elements)
    other = data.draw(boxes_in(shape))
    assert bits(values_of(cut(together, other))) == bits(values[other.slices].contiguous())
    if not isinstance(stored, torch.Tensor | RoundedWeight):
        assert stored_equal(in_one(together), stored)


@given(st.data())
def test_parts_that_were_quantized_apart_on_the_same_steps_are_joined_as_levels(data):
    shape = data.draw(SHAPES)
    tensor = random_tensor(shape, 1) * random_tensor(shape, 2).exp()
    boxes = data.draw(partitions(shape))
    for quantizer in (lambda t: quantize(t, -6), lambda t: quantize_to_log_grid(t.square(), 4)):
        whole = quantizer(tensor)
        joined = in_one(patchwork(tensor.dtype, tensor.shape, [(b, quantizer(tensor[b.slices])) for b in boxes]))
        assert isinstance(joined, QuantizedTensor)
        assert bits(values_of(joined)) == bits(values_of(whole))
        assert stored_equal(joined, whole)


def test_boxes_on_different_steps_keep_their_levels_and_have_values_only_together():
    tensor = random_tensor((6, 4), 1)
    top, bottom = Box((0, 0), (3, 4)), Box((3, 0), (3, 4))
    parts = [(top, quantize(tensor[:3], -4)), (bottom, quantize(tensor[3:], -5))]
    together = patchwork(torch.float32, torch.Size([6, 4]), parts)
    assert isinstance(in_one(together), torch.Tensor)
    assert bits(in_one(together)) == bits(values_of(together)) == bits(torch.cat([values_of(p) for _, p in parts]))
    assert cut(together, bottom) is parts[1][1]
    inside = cut(together, Box((1, 1), (2, 3)))
    assert isinstance(inside, QuantizedTensor)
    assert stored_equal(inside, cut(parts[0][1], Box((1, 1), (2, 3))))
    assert isinstance(cut(together, Box((2, 0), (2, 4))), torch.Tensor)


def test_what_is_cut_depends_only_on_the_boxes_that_overlap():
    """A reader that has read only these boxes must get the same levels and codebook as one that has read all."""
    tensor = random_tensor((6, 4), 1).square() * torch.tensor([1, 1, 100, 1e-4, 1, 1])[:, None]
    parts = [(Box((row, 0), (1, 4)), quantize_to_log_grid(tensor[row : row + 1], 4)) for row in range(6)]
    together = patchwork(torch.float32, torch.Size([6, 4]), parts)
    box = Box((0, 1), (2, 3))
    alone = patchwork(torch.float32, torch.Size([2, 4]), parts[:2])
    assert stored_equal(cut(together, box), cut(alone, box))
    assert cut(together, box).codebook == cut(alone, box).codebook != in_one(together).codebook


def test_boxes_of_rank_one_with_other_rows_have_values_only_together():
    tensor = random_tensor((6, 8), 1).square()
    left, right = Box((0, 0), (6, 4)), Box((0, 4), (6, 4))
    parts = [(left, quantize_rank_one(tensor[:, :4])), (right, quantize_rank_one(tensor[:, 4:] * 9))]
    joined = in_one(patchwork(torch.float32, torch.Size([6, 8]), parts))
    assert isinstance(joined, torch.Tensor)
    assert bits(joined) == bits(torch.cat([values_of(stored) for _, stored in parts], 1))


def test_centres_of_zero_and_minus_zero_are_not_the_same():
    def of(centre):
        centres = Centres(np.array([centre], dtype=np.float32))
        return QuantizedTensor(torch.float32, torch.Size([2]), np.full(2, 2, np.uint8), centres, np.zeros(0, np.uint16))

    parts = [(Box((0,), (2,)), of(0.0)), (Box((2,), (2,)), of(-0.0))]
    joined = in_one(patchwork(torch.float32, torch.Size([4]), parts))
    assert bits(joined) == bits(torch.tensor([0.0, 0.0, -0.0, -0.0]))


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (6, 3))],
        [Box((0, 0), (3, 4)), Box((0, 0), (3, 4))],
        [Box((0, 0), (4, 4)), Box((2, 0), (4, 4))],
        [],
    ],
    ids=["a column is missing", "the same rows twice", "rows overlap", "nothing"],
)
def test_boxes_that_do_not_cover_the_tensor_once_are_refused(boxes):
    tensor = random_tensor((6, 4), 1)
    with pytest.raises(ValueError, match="do not cover"):
        patchwork(torch.float32, torch.Size([6, 4]), [(box, cut(tensor, box)) for box in boxes])


@given(st.data())
def test_boxes_tile_a_tensor_if_they_cover_each_element_once(data):
    shape = data.draw(SHAPES)
    boxes = list(data.draw(partitions(shape)))
    assert tile(shape, boxes)
    for _ in range(data.draw(st.integers(0, 2))):
        boxes.append(data.draw(boxes_in(shape)))
    if data.draw(st.booleans()) and boxes:
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    times = np.zeros(shape, int)
    for box in boxes:
        times[box.slices] += 1
    assert tile(shape, boxes) == bool((times == 1).all())


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
        patchwork(torch.float32, torch.Size([6, 4]), [part])


@pytest.mark.parametrize("box", [Box((0, 0), (7, 4)), Box((-1, 0), (2, 4)), Box((0,), (6,))])
def test_a_box_outside_the_tensor_cannot_be_cut(box):
    with pytest.raises(ValueError, match="it has no box"):
        cut(quantize(torch.zeros(6, 4), 0), box)


def test_tensors_without_elements_and_without_dimensions_can_be_cut_and_put_together():
    scalar = torch.tensor(3.0)
    assert patchwork(torch.float32, torch.Size([]), [(Box((), ()), cut(scalar, Box((), ())))]) is scalar
    empty = torch.empty(0, 4)
    assert values_of(patchwork(torch.float32, empty.shape, [])).shape == (0, 4)
    rows = Box((2, 0), (0, 4))
    assert cut(torch.zeros(5, 4), rows).shape == (0, 4)
    assert values_of(cut(quantize(torch.zeros(5, 4), 0), rows)).shape == (0, 4)


def test_overlaps_of_boxes():
    box = Box((2, 0), (3, 4))
    assert box.overlap(Box((4, 3), (5, 5))) == Box((4, 3), (1, 1))
    assert box.overlap(Box((5, 0), (1, 4))) is None
    assert Box((4, 3), (1, 1)).relative_to(box) == Box((2, 3), (1, 1))
    assert box.elements == 12
