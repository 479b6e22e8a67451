"""All weights of a checkpoint by k-means: shared thresholds, tensors that are left out, weights without gradients."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.tensors.codebook import PROTECTED, PRUNED
from dynaquant.state.flatten import flatten
from dynaquant.state.roles import labels

LINEAR, CONV = Label("weight", "linear"), Label("weight", "conv")
MAGNITUDE = Configuration(pruned=0.2, protected=0.02, protection_metric="magnitude")
SENSITIVITY = Configuration(pruned=0.2, pruning_metric="sensitivity", protected=0.02, protection_metric="sensitivity")


def quantized_and_notes(weights, all_labels, gradients, configuration) -> tuple[dict[str, QuantizedTensor], list[str]]:
    prepared = kmeans_weights(weights, all_labels, gradients)
    return quantize_weights(prepared, configuration), prepared.notes


def share(quantized, level):
    return float((quantized.levels == level).mean())


def level_shares(quantized):
    """The fractions of values that are pruned and protected in several tensors together."""
    levels = np.concatenate([tensor.levels for tensor in quantized])
    return float((levels == PRUNED).mean()), float((levels == PROTECTED).mean())


def same(a, b):
    return a.keys() == b.keys() and all(
        np.array_equal(a[name].levels, b[name].levels)
        and np.array_equal(a[name].centres, b[name].centres)
        and np.array_equal(a[name].protected, b[name].protected)
        for name in a
    )


def trained_step():
    """A small model after one backward pass: weights, labels, gradients."""
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 50))
    nn.functional.cross_entropy(model(torch.arange(50)), torch.arange(50)).backward()
    _, tensors = flatten({"model": model.state_dict()})
    all_labels = labels(tensors, {"model": model})
    weights = {name: tensor for name, tensor in tensors.items() if all_labels[name].role == "weight"}
    gradients = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return weights, all_labels, {name: gradients[name] for name in weights}


def test_tensors_of_one_layer_type_share_their_thresholds():
    small, large = torch.randn(100, 100) * 0.001, torch.randn(100, 100)
    weights = {"small": small, "large": large}
    together, _ = quantized_and_notes(weights, {"small": LINEAR, "large": LINEAR}, {}, MAGNITUDE)
    assert level_shares(together.values()) == pytest.approx((0.2, 0.02), abs=0.004)
    assert share(together["small"], PRUNED) == pytest.approx(0.4, abs=0.01)
    assert share(together["large"], PRUNED) < 0.002
    assert share(together["small"], PROTECTED) == 0


def test_tensors_of_different_layer_types_have_their_own_thresholds():
    weights = {"small": torch.randn(100, 100) * 0.001, "large": torch.randn(100, 100)}
    apart, _ = quantized_and_notes(weights, {"small": CONV, "large": LINEAR}, {}, MAGNITUDE)
    for quantized in apart.values():
        assert level_shares([quantized]) == pytest.approx((0.2, 0.02), abs=0.006)


def test_sensitivity_thresholds_are_shared_by_layer_type_too():
    weights = {"calm": torch.rand(100, 100) + 1, "busy": torch.rand(100, 100) + 1}
    gradients = {"calm": torch.rand(100, 100) * 0.001, "busy": torch.rand(100, 100) + 0.01}
    quantized, _ = quantized_and_notes(weights, dict.fromkeys(weights, LINEAR), gradients, SENSITIVITY)
    assert level_shares(quantized.values()) == pytest.approx((0.2, 0.02), abs=0.004)
    assert share(quantized["calm"], PRUNED) == pytest.approx(0.4, abs=0.01)
    assert share(quantized["busy"], PRUNED) == share(quantized["calm"], PROTECTED) == 0


def test_embeddings_have_their_own_number_of_bins():
    weights, all_labels, _ = trained_step()
    configuration = dataclasses.replace(MAGNITUDE, bins=6, embedding_bins=32)
    quantized, _ = quantized_and_notes(weights, all_labels, {}, configuration)
    assert {name: len(q.centres) for name, q in quantized.items()} == {
        "model.0.weight": 32,
        "model.1.weight": 6,
        "model.3.weight": 6,
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_tensors_with_nans_or_infinities_are_noted_and_left_out(bad):
    weights = {"good": torch.randn(50, 50), "bad": torch.randn(50, 50)}
    weights["bad"][3, 4] = weights["bad"][20, 1] = bad
    quantized, notes = quantized_and_notes(weights, dict.fromkeys(weights, LINEAR), {}, MAGNITUDE)
    assert list(quantized) == ["good"]
    assert notes == ["bad: 2 infinite or NaN values, stored exactly"]
    alone, _ = quantized_and_notes({"good": weights["good"]}, {"good": LINEAR}, {}, MAGNITUDE)
    assert same(quantized, alone)


def test_a_float64_weight_beyond_float32_is_noted_and_left_out():
    quantized, notes = quantized_and_notes({"w": torch.tensor([[1e300, 1.0]]).double()}, {"w": LINEAR}, {}, MAGNITUDE)
    assert (quantized, len(notes)) == ({}, 1)


@pytest.mark.parametrize("tensor", [torch.zeros(0, 7), torch.ones(1, 1), torch.full((9, 9), -0.3), torch.zeros(4, 4)])
def test_empty_and_constant_tensors_are_left_out_without_a_note(tensor):
    assert quantized_and_notes({"w": tensor}, {"w": LINEAR}, {}, MAGNITUDE) == ({}, [])


def test_a_checkpoint_without_weights_works():
    assert quantized_and_notes({}, {}, {}, SENSITIVITY) == ({}, [])


@pytest.mark.parametrize("protection", ["sensitivity", "both"])
def test_without_gradients_magnitude_replaces_sensitivity(protection):
    weights, all_labels, _ = trained_step()
    asked = dataclasses.replace(SENSITIVITY, protection_metric=protection)
    assert same(
        quantized_and_notes(weights, all_labels, {}, asked)[0],
        quantized_and_notes(weights, all_labels, {}, MAGNITUDE)[0],
    )


def test_gradients_do_not_matter_if_no_metric_uses_them():
    weights, all_labels, gradients = trained_step()
    assert same(
        quantized_and_notes(weights, all_labels, gradients, MAGNITUDE)[0],
        quantized_and_notes(weights, all_labels, {}, MAGNITUDE)[0],
    )


def test_the_most_sensitive_weights_are_protected_and_the_least_sensitive_pruned():
    weights, all_labels, gradients = trained_step()
    quantized, _ = quantized_and_notes(weights, all_labels, gradients, SENSITIVITY)
    for name in ("model.0.weight", "model.1.weight", "model.3.weight"):
        sensitivity = (weights[name] * gradients[name]).abs().flatten().numpy()
        levels = quantized[name].levels
        assert sensitivity[levels == PRUNED].max() <= sensitivity[levels != PRUNED].min()
        assert sensitivity[levels == PROTECTED].min() >= sensitivity[levels != PROTECTED].max()
    assert level_shares(quantized.values()) == pytest.approx((0.2, 0.02), abs=0.01)


def test_protection_by_both_protects_half_of_the_fraction_by_each():
    weights = {"w": torch.randn(300, 300)}
    gradients = {"w": torch.randn(300, 300)}
    configuration = dataclasses.replace(MAGNITUDE, protection_metric="both")
    quantized, _ = quantized_and_notes(weights, {"w": LINEAR}, gradients, configuration)
    protected = torch.from_numpy(quantized["w"].levels == PROTECTED).reshape(300, 300)
    largest = weights["w"].abs() >= weights["w"].abs().quantile(0.991)
    most_sensitive = (weights["w"] * gradients["w"]).abs() >= (weights["w"] * gradients["w"]).abs().quantile(0.991)
    assert protected[largest].all()
    assert protected[most_sensitive].all()
    assert protected.float().mean() <= 0.02


def test_a_weight_without_a_gradient_is_quantized_by_magnitude_alone():
    weights, all_labels, gradients = trained_step()
    del gradients["model.1.weight"]
    quantized, _ = quantized_and_notes(weights, all_labels, gradients, SENSITIVITY)
    assert level_shares([quantized["model.1.weight"]]) == (0, 0)
    assert share(quantized["model.3.weight"], PRUNED) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("configuration", [MAGNITUDE, SENSITIVITY, Configuration()])
def test_quantizing_is_a_pure_function(configuration):
    weights, all_labels, gradients = trained_step()
    before = {name: tensor.clone() for name, tensor in (weights | gradients).items()}
    random_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, _ = quantized_and_notes(weights, all_labels, gradients, configuration)
    second, _ = quantized_and_notes(weights, all_labels, gradients, configuration)
    assert same(first, second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in (weights | gradients).items())
    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert np.array_equal(np.random.get_state()[1], random_state[1])


def test_weights_prepared_once_serve_every_configuration():
    weights, all_labels, gradients = trained_step()
    prepared = kmeans_weights(weights, all_labels, gradients)
    configurations = [MAGNITUDE, SENSITIVITY, Configuration(), dataclasses.replace(SENSITIVITY, bins=4), MAGNITUDE]
    found = [quantize_weights(prepared, configuration) for configuration in configurations]
    for quantized, configuration in zip(found, configurations, strict=True):
        assert same(quantized, quantized_and_notes(weights, all_labels, gradients, configuration)[0])
    assert not same(found[0], found[1])
    assert not same(found[1], found[3])


def test_tensors_to_store_exactly_are_left_out_of_all_fields():
    weights = {"good": torch.randn(9, 9), "bad": torch.full((9, 9), float("nan")), "constant": torch.ones(9, 9)}
    gradients = {name: torch.randn(9, 9) for name in weights}
    prepared = kmeans_weights(weights, dict.fromkeys(weights, LINEAR), gradients)
    parts = (prepared.weights, prepared.gradients, prepared.layer_types, prepared.histograms, prepared.sensitivities)
    assert [list(part) for part in parts] == [["good"]] * 5


def test_gradients_of_unknown_weights_are_ignored():
    weights, all_labels, gradients = trained_step()
    with_more, _ = quantized_and_notes(weights, all_labels, gradients | {"else": torch.randn(3, 3)}, SENSITIVITY)
    assert same(with_more, quantized_and_notes(weights, all_labels, gradients, SENSITIVITY)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_every_quantizable_dtype_work_with_float32_gradients(dtype):
    weights, all_labels, gradients = trained_step()
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    quantized, _ = quantized_and_notes(weights, all_labels, gradients, SENSITIVITY)
    for name, tensor in quantized.items():
        assert dequantize(tensor).dtype == dtype
        assert (dequantize(tensor) - weights[name]).abs().mean() < 0.2 * weights[name].abs().mean()
