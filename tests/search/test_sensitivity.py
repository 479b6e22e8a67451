"""Measuring the sensitivity of a metric to each tensor."""

import pytest
import torch

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.quantize.grid_weights import grid_weights
from dynaquant.search.sensitivity import groups_of, measure_sensitivity

LEAST_SENSITIVITY = 0.01
MOST_GROUPS = 32


def test_large_tensors_are_quantized_alone_and_small_ones_together():
    sizes = {"a.weight": 10_000, "a.bias": 10, "b.weight": 20_000, "b.norm": 10}
    assert groups_of(sizes) == [["a.weight"], ["b.weight"], ["a.bias", "b.norm"]]


def test_if_there_are_many_layers_neighbours_are_quantized_together():
    sizes = {f"h.{i}.{kind}": 1000 for i in range(100) for kind in ("attn", "mlp")} | {"wte": 50_000}
    groups = groups_of(sizes)
    assert len(groups) <= MOST_GROUPS
    assert sorted(name for group in groups for name in group) == sorted(sizes)
    assert ["wte"] in groups
    assert all(len({name.rpartition(".")[2] for name in group}) == 1 for group in groups)


@pytest.mark.parametrize("count", [0, 1, 40, 1000])
def test_there_are_never_too_many_groups(count):
    groups = groups_of({"abc"[i % 3] * (i + 1): 100 for i in range(count)})
    assert sum(map(len, groups)) == count
    assert len(groups) <= max(MOST_GROUPS, count)
    assert all(groups)


def weights_of(**scales: float):
    return grid_weights({name: scale * torch.randn(32, 32) for name, scale in scales.items()}, {}, {}, 0)


def squared_movement(weights, quantized) -> dict[str, float]:
    return {n: float((dequantize(q) - weights.weights[n]).square().sum()) for n, q in quantized.items()}


def test_the_sensitivity_is_the_degradation_per_squared_error():
    weights = weights_of(a=1.0, b=1.0, c=10.0)
    sensitivities = {"a": 1.0, "b": 7.0, "c": 0.5}
    mean_squares = measure_sensitivity(
        weights,
        lambda q: sum(sensitivities[n] * moved for n, moved in squared_movement(weights, q).items()),
        lambda _: None,
    )
    assert mean_squares["b"] / mean_squares["a"] == pytest.approx(7, rel=0.01)
    assert mean_squares["c"] / mean_squares["a"] == pytest.approx(0.5, rel=0.01)


def test_a_tensor_of_unknown_sensitivity_counts_like_the_median():
    weights = weights_of(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0)

    def degradation(quantized):
        (name,) = quantized
        if name == "b":
            raise RuntimeError("no metric for this one")
        return {"a": 1.0, "c": float("nan"), "d": 0.0, "e": -1.0}[name] * squared_movement(weights, quantized)[name]

    mean_squares = measure_sensitivity(weights, degradation, lambda _: None)
    assert mean_squares["b"] == pytest.approx(mean_squares["a"], rel=0.3)
    assert mean_squares["c"] == pytest.approx(mean_squares["a"], rel=0.3)
    assert mean_squares["d"] == pytest.approx(mean_squares["a"], rel=0.3)
    assert mean_squares["e"] == pytest.approx(
        LEAST_SENSITIVITY * mean_squares["a"], rel=0.3
    )  # an improvement counts as a low sensitivity


def test_a_metric_that_never_changes_has_no_sensitivities():
    assert measure_sensitivity(weights_of(a=1.0, b=1.0), lambda _: 0.0, lambda _: None) == {}
    assert measure_sensitivity(weights_of(), lambda _: 1.0, lambda _: None) == {}


def test_measuring_the_sensitivity_reports_progress():
    reported: list[str] = []
    measure_sensitivity(weights_of(a=1.0, b=1.0), lambda _: 1.0, reported.append)
    assert [text.rpartition(": ")[2] for text in reported] == ["1 of 2", "2 of 2"]
