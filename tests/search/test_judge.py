"""Judges of quantized weights: the metric, or the distortion if there is no metric."""

import math

import pytest
import torch
from torch import nn, optim
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.quantize.grid_weights import grid_weights
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights, kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.search.distortion import distortion, mean_squared_gradients
from dynaquant.search.judge import DistortionJudge, MetricJudge
from dynaquant.search.live_model import LiveModel
from dynaquant.state.roles import labels

DISTORTION_SCALE = 3.0


def prepared(model: nn.Module) -> KMeansWeights:
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.ndim >= 2}
    return kmeans_weights(weights, labels(weights, {"model": model}, {}), {})


def probability(model: nn.Module) -> float:
    """Returns the mean probability of the right token: a metric that is higher for a better model."""
    with torch.no_grad():
        return model.eval()(torch.arange(40)).softmax(1).diagonal().mean().item()


def loss(model: nn.Module) -> float:
    with torch.no_grad():
        return nn.functional.cross_entropy(model.eval()(torch.arange(40)), torch.arange(40)).item()


@pytest.fixture
def model() -> nn.Module:
    model = model_of()
    train(model, optim.AdamW(model.parameters(), lr=1e-2), 30)
    return model


# Judges


@pytest.mark.parametrize(("metric", "higher_is_better"), [(loss, False), (probability, True)])
def test_the_metric_sees_the_weights_that_a_restore_would_return(model, metric, higher_is_better):
    judge = MetricJudge(LiveModel(model), metric, higher_is_better, metric(model), {})
    for configuration in (dq.Configuration(bins=4, pruned=0.5), dq.Configuration(bins=254, embedding_bins=254)):
        quantized = quantize_weights(prepared(model), configuration)
        quality = judge(quantized)
        restored = model_of()
        values = {name.removeprefix("model."): dequantize(tensor) for name, tensor in quantized.items()}
        restored.load_state_dict({**model.state_dict(), **values})
        assert quality.original == metric(model)
        assert quality.restored == metric(restored)
        worse = quality.original - quality.restored if higher_is_better else quality.restored - quality.original
        assert quality.degradation == worse / quality.original
        assert (quality.degradation > 0.05) == (configuration.bins == 4)


def test_the_metric_sees_the_given_values_of_weights_that_are_already_decided(model):
    seen = {}

    def evaluate(scored: nn.Module) -> float:
        seen.update({name: bits(p) for name, p in scored.named_parameters()})
        return 1.0

    decided = {"model.1.weight": torch.ones(24, 24)}
    quantized = quantize_weights(prepared(model), dq.Configuration())
    del quantized["model.1.weight"]
    MetricJudge(LiveModel(model), evaluate, False, 1.0, decided)(quantized)
    assert seen["1.weight"] == bits(nn.Parameter(decided["model.1.weight"]))
    assert seen["4.weight"] == bits(nn.Parameter(dequantize(quantized["model.4.weight"])))
    assert seen["4.bias"] == bits(model[4].bias)


@pytest.mark.parametrize("dithered", [False, True])
def test_the_metric_sees_the_values_of_a_grid_that_is_not_quantized_yet(model, dithered):
    weights = grid_weights(prepared(model).weights, {}, {}, seed=3, step_limits=LOOSEST_LIMITS)
    kept = []

    def evaluate(scored: nn.Module) -> float:
        kept.append({f"model.{name}": p for name, p in scored.named_parameters()})  # as if it looked for the best model
        return 1.0

    judge = MetricJudge(LiveModel(model), evaluate, False, 1.0, {})
    configurations = [GridConfiguration(scale, dithered) for scale in (-20, 0, 20)]
    for configuration in configurations:
        judge(weights.candidate(configuration))
    for configuration, seen in zip(configurations, kept, strict=True):
        for name, quantized in weights.quantize(configuration).items():
            assert bits(seen[name]) == bits(nn.Parameter(dequantize(quantized)))


def test_candidates_that_the_metric_does_not_keep_use_the_same_memory(model):
    weights = grid_weights(prepared(model).weights, {}, {}, seed=3, step_limits=LOOSEST_LIMITS)
    addresses, values = [], []

    def evaluate(scored: nn.Module) -> float:
        addresses.append([scored.get_parameter(name.removeprefix("model.")).data_ptr() for name in weights.weights])
        values.append([bits(scored.get_parameter(name.removeprefix("model."))) for name in weights.weights])
        scored[0].weight.fill_(7.0)  # what a metric writes to a candidate is not seen in the next one
        return 1.0

    judge = MetricJudge(LiveModel(model), evaluate, False, 1.0, {})
    for scale in (0, 20, 0):
        judge(weights.candidate(GridConfiguration(scale)))
    assert addresses[0] == addresses[1] == addresses[2]
    assert values[0] == values[2] != values[1]


def test_without_a_metric_a_grid_is_judged_as_its_levels_are(model):
    weights = grid_weights(prepared(model).weights, {}, {}, seed=3, step_limits=LOOSEST_LIMITS)
    judge = DistortionJudge(weights.weights, {}, "distortion")
    for scale in (-20, 0, 20):
        configuration = GridConfiguration(scale)
        quality = judge(weights.candidate(configuration))
        assert quality.degradation == judge(weights.quantize(configuration)).degradation > 0


def test_exceptions_of_the_metric_reach_the_caller(model):
    def fail(_: nn.Module) -> float:
        raise ZeroDivisionError("no tokens")

    with pytest.raises(ZeroDivisionError, match="no tokens"):
        MetricJudge(LiveModel(model), fail, False, 1.0, {})({})


@pytest.mark.parametrize("mean_squares", [{}, {"model.0.weight": 1e-4, "model.1.weight": 1e-6, "model.4.weight": 3e-5}])
def test_without_a_metric_finer_configurations_have_a_lower_estimated_degradation(model, mean_squares):
    weights = prepared(model).weights
    judge = DistortionJudge(weights, mean_squares, "fisher distortion" if mean_squares else "distortion")
    found = []
    for bins in (4, 8, 16, 32, 64):
        configuration = dq.Configuration(bins=bins, embedding_bins=bins)
        quantized = quantize_weights(prepared(model), configuration)
        quality = judge(quantized)
        assert math.isnan(quality.original)
        assert math.isnan(quality.restored)
        assert quality.degradation == DISTORTION_SCALE * distortion(weights, quantized, mean_squares)
        found.append(quality.degradation)
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < found[0] / 20


def test_distortion_is_the_squared_error_relative_to_the_squared_weights(model):
    weights = prepared(model).weights
    quantized = quantize_weights(prepared(model), dq.Configuration(bins=8))
    mean_squares = {name: 10.0**-i for i, name in enumerate(weights)}
    moved = {name: float((dequantize(quantized[name]) - w).double().square().sum()) for name, w in weights.items()}
    total = {name: float(w.double().square().sum()) for name, w in weights.items()}
    assert distortion(weights, quantized, {}) == pytest.approx(sum(moved.values()) / sum(total.values()), rel=1e-5)
    assert distortion(weights, quantized, mean_squares) == pytest.approx(
        sum(mean_squares[n] * moved[n] for n in weights)
        / sum(mean_squares[n] * total[n] for n, weight in weights.items() if weight.ndim > 1),
        rel=1e-5,
    )
    assert distortion(weights, quantized, {name: 7 * f for name, f in mean_squares.items()}) == pytest.approx(
        distortion(weights, quantized, mean_squares)
    )
    assert distortion(weights, {}, mean_squares) == 0


# The mean squared gradient of a tensor


def moments_after(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, float]:
    train(model, optimizer, 5)
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    return mean_squared_gradients(parameters, [optimizer], dict.fromkeys(parameters, 4.0))


@pytest.mark.parametrize(
    ("kind", "key"), [(optim.Adam, "exp_avg_sq"), (optim.AdamW, "exp_avg_sq"), (optim.RMSprop, "square_avg")]
)
def test_mean_squares_come_from_the_optimizers_second_moments(kind, key):
    model = model_of()
    optimizer = kind(model.parameters(), lr=1e-3)
    found = moments_after(optimizer, model)
    expected = {f"model.{name}": float(optimizer.state[p][key].mean()) for name, p in model.named_parameters()}
    assert found == pytest.approx(expected)
    assert all(value > 0 for value in found.values())


def test_without_second_moments_mean_squares_come_from_recorded_gradients():
    model = model_of()
    found = moments_after(optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), model)
    assert found == {f"model.{name}": 4.0 for name, _ in model.named_parameters()}


def test_second_moments_and_recorded_gradients_are_not_mixed():
    model = model_of()
    optimizer = optim.AdamW(model[1].parameters(), lr=1e-3)
    train(model, optimizer, 3)
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    one = {"model.0.weight": 9.0}
    every = dict.fromkeys(parameters, 9.0)
    moments = {
        f"model.1.{name}": pytest.approx(float(optimizer.state[p]["exp_avg_sq"].mean()))
        for name, p in model[1].named_parameters()
    }
    # The source that knows more parameters; the optimizer if both know as many.
    assert mean_squared_gradients(parameters, [optimizer], one) == moments
    assert mean_squared_gradients(parameters, [optimizer], every) == every
    with_moments = {name: p for name, p in parameters.items() if name in moments}
    assert mean_squared_gradients(with_moments, [optimizer], every) == moments


def test_with_several_optimizers_each_parameter_gets_its_own_second_moments():
    model = model_of()
    optimizers = [optim.AdamW(part.parameters(), lr=1e-3) for part in (model[0], model[1])]
    for optimizer in optimizers:
        train(model, optimizer, 2)
    parameters = {f"model.{name}": p for name, p in model.named_parameters() if name[0] in "01"}
    found = mean_squared_gradients(parameters, optimizers, {})
    assert found.keys() == parameters.keys()
    assert all(value > 0 for value in found.values())


def test_moments_that_are_not_finite_or_coded_in_8_bits_are_ignored():
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 2)
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    whole = mean_squared_gradients(parameters, [optimizer], {})
    broken, coded, *_ = parameters
    optimizer.state[parameters[broken]]["exp_avg_sq"].view(-1)[0] = torch.nan
    codes = torch.full_like(parameters[coded], 130, dtype=torch.uint8)  # as an optimizer with 8 bits has them
    optimizer.state[parameters[coded]]["exp_avg_sq"] = codes
    found = mean_squared_gradients(parameters, [optimizer], {})
    assert found == {name: value for name, value in whole.items() if name not in (broken, coded)}
    assert found


def test_without_any_source_there_are_no_mean_squares():
    model = model_of()
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    zeros = dict.fromkeys(parameters, 0.0)
    assert mean_squared_gradients(parameters, [], {}) == {}
    # An optimizer that has made no step has no second moments.
    assert mean_squared_gradients(parameters, [optim.AdamW(model.parameters())], {}) == {}
    assert mean_squared_gradients(parameters, [], zeros) == {}
    assert mean_squared_gradients({}, [], {}) == {}


def test_a_bias_with_a_large_gradient_does_not_loosen_the_estimate():
    weights = {"matrix": torch.randn(50, 40), "bias": torch.randn(50), "scale": torch.randn(50, 1)}
    alike = dict.fromkeys(weights, 1.0)
    coarse = grid_weights(weights, alike, {}, 0).candidate(dq.GridConfiguration(-32))  # a step of a quarter
    found = distortion(weights, coarse, alike)
    for name in ("bias", "scale"):
        assert distortion(weights, coarse, {**alike, name: 1e6}) > 1000 * found
    vectors = {name: weights[name] for name in ("bias", "scale")}
    assert distortion(vectors, {name: coarse[name] for name in vectors}, alike) == pytest.approx(1 / 16 / 12, rel=0.5)
