"""Streams of quantized tensors, conditioned on any parent."""

import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import bits

from dynaquant.engine.forms.form import Coded, StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.forms.schemes import Rearranged
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.tensors.codebook import PROTECTED, Centres
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES

CODERS: list[Coder] = ["conditional", "rearranged"]


def round_trip(stored: QuantizedTensor, parent: QuantizedTensor | None, coder: Coder) -> StoredTensor:
    scheme, coded = encode(stored, parent, coder)
    return decode(scheme, Coded(stored.dtype, stored.shape, coded, parent))


def quantized_of(shape: tuple[int, ...], bins: int, dtype=torch.float32, seed=0) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 2 + bins, int(np.prod(shape))).astype(np.uint8)
    levels[rng.random(levels.size) < 0.5] = bins + 1
    protected = rng.integers(0, 2**15, int((levels == PROTECTED).sum())).astype(np.uint16)
    centres = rng.standard_normal(bins).astype(np.float32)
    return QuantizedTensor(dtype, torch.Size(shape), levels, Centres(centres), protected)


def assert_same(found: StoredTensor, wanted: QuantizedTensor) -> None:
    assert isinstance(found, QuantizedTensor)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    for part in ("levels", "centres", "protected"):
        a, b = getattr(found, part), getattr(wanted, part)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    assert bits(values_of(found)) == bits(values_of(wanted))


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (300, 300)], ids=str)
def test_a_quantized_tensor_survives_a_round_trip(dtype, shape, coder):
    wanted = quantized_of(shape, 16, dtype)
    assert_same(round_trip(wanted, None, coder), wanted)


@pytest.mark.parametrize("coder", CODERS)
def test_an_empty_tensor_survives_a_round_trip(coder):
    """Runs in a process of its own, because an earlier version crashed it."""
    wanted = quantized_of((0, 3), 16)
    fork = multiprocessing.get_context("fork").Process(
        target=lambda: assert_same(round_trip(wanted, None, coder), wanted)
    )
    fork.start()
    fork.join()
    assert fork.exitcode == 0


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    bins=st.integers(0, 254),
    parent_bins=st.integers(0, 254),
    seed=st.integers(0, 5),
    coder=st.sampled_from(CODERS),
)
def test_a_quantized_tensor_survives_a_round_trip_if_the_parent_has_other_bins(shape, bins, parent_bins, seed, coder):
    parent, wanted = quantized_of(shape, parent_bins, seed=seed), quantized_of(shape, bins, seed=seed + 1)
    assert_same(round_trip(wanted, parent, coder), wanted)


@pytest.mark.parametrize(("bins", "parent_bins"), [(16, 16), (4, 254), (254, 4), (1, 2)])
def test_a_large_tensor_is_rearranged_by_a_parent_with_other_bins(bins, parent_bins):
    parent, wanted = quantized_of((300, 300), parent_bins, seed=1), quantized_of((300, 300), bins)
    scheme, _ = encode(wanted, parent, "rearranged")
    assert isinstance(scheme, Rearranged)
    assert scheme.arrangement == "rearranged"
    assert_same(round_trip(wanted, parent, "rearranged"), wanted)


@pytest.mark.parametrize("coder", CODERS)
def test_the_same_levels_as_the_parent_cost_almost_nothing(coder):
    wanted = quantized_of((300, 300), 16)
    _, alone = encode(wanted, None, coder)
    _, delta = encode(wanted, wanted, coder)
    assert len(delta) < len(alone) - 20_000
    assert len(delta) < 2 * len(wanted.protected) + 1000


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("parent", [None, quantized_of((30, 31), 16)], ids=["none", "another size"])
def test_a_delta_without_its_parent_is_an_error(parent, coder):
    wanted = quantized_of((30, 30), 16)
    scheme, coded = encode(wanted, wanted, coder)
    assert scheme.needs_parent
    with pytest.raises(ValueError, match="the parent has no levels of"):
        decode(scheme, Coded(wanted.dtype, wanted.shape, coded, parent))
