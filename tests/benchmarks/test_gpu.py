"""The benchmark for accelerators runs to its end, on the host and with a tiny model."""

import math

import pytest
from gpu import METHODS, SIZES, Training, lloyd, measure, tables

torch = pytest.importorskip("torch", "2.6")  # torch.accelerator


@pytest.mark.slow
def test_everything_is_measured_on_the_host():
    found = measure(SIZES["tiny"], "cpu", steps=30, every=5, crashes=2)
    assert found["saves"].keys() == set(METHODS)
    assert all(value > 0 for each in found["saves"].values() for value in each.values())
    assert math.isclose(found["crashed"], found["undisturbed"], rel_tol=0.05)
    assert len(tables(found, 2)) == 4  # no profile without CUDA


def test_the_text_can_be_learned():
    training = Training(SIZES["tiny"], "cpu")
    before = training.loss()
    training.steps(30)
    assert training.loss() < before


def test_lloyds_algorithm_finds_clusters():
    values = torch.cat([torch.randn(100) * 0.01 + centre for centre in (-1, 0, 2)])
    assert torch.allclose(lloyd(values, 3), torch.tensor([-1.0, 0.0, 2.0]), atol=0.01)
