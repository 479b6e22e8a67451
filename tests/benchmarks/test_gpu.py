"""The benchmark for accelerators runs to its end, on the host and with a tiny model."""

import math

import pytest
from gpu import METHODS, Table, lloyd, measure, page
from gpu_training import SIZES, Text, Training

torch = pytest.importorskip("torch", "2.6")  # torch.accelerator


@pytest.mark.slow
def test_everything_is_measured_on_the_host():
    shown = []
    found = measure(SIZES["tiny"], "cpu", 30, 5, 2, lambda new, _: shown.extend(new))
    assert found["saves"].keys() == set(METHODS)
    timed = [value for each in found["saves"].values() for key, value in each.items() if key != "memory"]
    assert all(value > 0 for value in [*timed, *found["restores"].values(), *found["clusters"].values()])
    assert math.isclose(found["crashed"], found["undisturbed"], rel_tol=0.05)
    assert len(shown) == 4  # no profile without CUDA
    assert all(each.title in page(shown, "", 5, "") for each in shown if isinstance(each, Table))


def test_the_text_goes_on_from_its_state():
    text, other = Text(SIZES["tiny"], "cpu", 1), Text(SIZES["tiny"], "cpu", 1)
    for _ in range(300):
        batch = text.batch()
    other.load_state_dict({"next": 299})
    assert torch.equal(other.batch(), batch)


def test_the_text_can_be_learned():
    training = Training(SIZES["tiny"], "cpu")
    before = training.loss()
    training.steps(30)
    assert training.loss() < before


def test_lloyds_algorithm_finds_clusters():
    values = torch.cat([torch.randn(100) * 0.01 + centre for centre in (-1, 0, 2)])
    assert torch.allclose(lloyd(values, 3), torch.tensor([-1.0, 0.0, 2.0]), atol=0.01)
