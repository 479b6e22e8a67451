"""The predicted size of a configuration is near the size of its streams."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynaquant as dq
from dynaquant.demo.models import GPT
from dynaquant.engine.forms.stored import encode
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights, kmeans_weights, quantize_weights
from dynaquant.methods.published.size import SizeModel
from dynaquant.state.roles import labels

CONFIGURATIONS = [
    dq.Configuration(bins, embedding_bins, pruned, metric, protected)
    for bins, embedding_bins in [(4, 16), (8, 32), (16, 16), (32, 32), (64, 64)]
    for pruned, metric in [(0.0, "magnitude"), (0.2, "magnitude"), (0.5, "sensitivity")]
    for protected in (0.0005, 0.01)
]


@pytest.fixture(scope="module")
def prepared() -> KMeansWeights:
    """The weights of a small GPT that was trained on arithmetic sequences."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=32, width=64, layers=2, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(10):
        text = (torch.arange(33) * torch.randint(1, 5, (8, 1)) + torch.randint(0, 9, (8, 1))) % 256
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    gradients = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return prepare({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, gradients)


def prepare(weights: dict[str, Tensor], gradients: dict[str, Tensor], module: nn.Module | None = None):
    label_of = labels(weights, {"model": module or GPT(256, 32, 64, 2, 2)}, {})
    return kmeans_weights({n: w for n, w in weights.items() if label_of[n].role == "weight"}, label_of, gradients)


@pytest.fixture(scope="module")
def stored_sizes(prepared) -> list[int]:
    """The bytes of a keyframe's weights with each configuration."""
    return [
        sum(len(encode(tensor, None)[1]) for tensor in quantize_weights(prepared, configuration).values())
        for configuration in CONFIGURATIONS
    ]


def test_the_predicted_size_is_near_that_of_a_keyframe(prepared, stored_sizes):
    sizes = SizeModel(prepared)
    for configuration, size in zip(CONFIGURATIONS, stored_sizes, strict=True):
        assert 0.75 * size < sizes.predict(configuration) < 1.1 * size


def test_predicted_sizes_rank_configurations_nearly_like_their_keyframes(prepared, stored_sizes):
    sizes = SizeModel(prepared)
    predicted = [sizes.predict(configuration) for configuration in CONFIGURATIONS]
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, stored_sizes)]
    assert np.corrcoef(*ranks)[0, 1] > 0.97
    pairs = [
        (i, j)
        for i in range(len(stored_sizes))
        for j in range(len(stored_sizes))
        if stored_sizes[i] > 1.15 * stored_sizes[j]
    ]
    assert len(pairs) > 250
    assert all(predicted[i] > predicted[j] for i, j in pairs)


def test_the_pruning_metric_does_not_change_the_prediction(prepared):
    sizes = SizeModel(prepared)
    by_metric = [sizes.predict(dq.Configuration(pruning_metric=metric)) for metric in ("magnitude", "sensitivity")]
    assert by_metric[0] == by_metric[1]


def test_more_bins_and_less_pruning_take_more_bytes(prepared):
    sizes = SizeModel(prepared)
    by_bins = [sizes.predict(dq.Configuration(bins=bins)) for bins in (4, 6, 8, 12, 16, 32, 64, 128, 254)]
    by_embedding_bins = [sizes.predict(dq.Configuration(embedding_bins=bins)) for bins in (16, 32, 64, 128, 254)]
    assert by_bins == sorted(set(by_bins))
    assert by_embedding_bins == sorted(set(by_embedding_bins))
    by_pruned = [sizes.predict(dq.Configuration(pruned=pruned)) for pruned in (0.5, 0.4, 0.3, 0.2, 0.1)]
    assert by_pruned == sorted(set(by_pruned))


def test_equally_frequent_levels_take_the_bits_of_their_index():
    module = nn.Linear(64, 64, bias=False)
    values = 2.0 ** torch.arange(8).repeat(512)[torch.randperm(4096)]
    sizes = SizeModel(prepare({"model.weight": values.reshape(64, 64)}, {}, module))
    predicted = sizes.predict(dq.Configuration(bins=8, pruned=0.0, protected=0.0))
    assert predicted == pytest.approx(4096 * 3 / 8)


def test_an_outlier_takes_two_bytes_beside_its_level():
    module = nn.Linear(64, 64, bias=False)
    values = torch.tensor([1.0, 1.0, 1.0, 64.0]).repeat(1024)[torch.randperm(4096)]
    sizes = SizeModel(prepare({"model.weight": values.reshape(64, 64)}, {}, module))
    quantized, protected = (
        sizes.predict(dq.Configuration(bins=2, pruned=0.0, protected=share)) for share in (0.0, 0.25)
    )
    assert protected == pytest.approx(quantized + 2 * 1024)


def test_no_weights_take_no_bytes():
    assert SizeModel(kmeans_weights({}, {}, {})).predict(dq.Configuration()) == 0
