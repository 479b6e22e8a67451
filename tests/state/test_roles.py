"""Roles and layer types of tensors, by their modules and optimizers, and by the user's patterns."""

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrizations

from dynaquant.engine.label import Label
from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten
from dynaquant.state.roles import labels, layer_type
from dynaquant.training.collect import collect


def labels_of(things, overrides=None):
    """Return (role, layer type) by tensor name."""
    _, tensors = flatten(collect(things))
    return {name: (label.role, label.layer_type) for name, label in labels(tensors, things, overrides).items()}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Embedding(5, 2), {"weight": ("weight", "embedding")}),
        (nn.EmbeddingBag(5, 2), {"weight": ("weight", "embedding")}),
        (nn.Conv1d(1, 2, 3), {"weight": ("weight", "conv"), "bias": ("exact", "conv")}),
        (nn.ConvTranspose3d(1, 2, 3), {"weight": ("weight", "conv"), "bias": ("exact", "conv")}),
        (nn.Linear(2, 3), {"weight": ("weight", "linear"), "bias": ("exact", "linear")}),
        (nn.Bilinear(2, 3, 4), {"weight": ("weight", "linear"), "bias": ("exact", "linear")}),
        (nn.LayerNorm([2, 3]), {"weight": ("weight", "norm"), "bias": ("weight", "norm")}),
        (nn.GroupNorm(2, 4), {"weight": ("exact", "norm"), "bias": ("exact", "norm")}),
        (nn.RMSNorm(4), {"weight": ("exact", "norm")}),
        (nn.PReLU(), {"weight": ("exact", "other")}),
        (
            nn.BatchNorm1d(3),
            dict.fromkeys(("weight", "bias"), ("exact", "norm"))
            | dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"), ("buffer", "norm")),
        ),
        (
            nn.GRU(2, 3),
            {f"weight_{k}h_l0": ("weight", "recurrent") for k in "ih"}
            | {f"bias_{k}h_l0": ("exact", "recurrent") for k in "ih"},
        ),
        (
            nn.MultiheadAttention(4, 2),
            {
                "in_proj_weight": ("weight", "linear"),
                "in_proj_bias": ("exact", "linear"),
                "out_proj.weight": ("weight", "linear"),
                "out_proj.bias": ("exact", "linear"),
            },
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_roles_follow_from_the_type_of_the_module(module, expected):
    found = labels_of({"model": nn.Sequential(nn.Identity(), module)})
    assert {name: label for name, label in found.items() if name.startswith("model.")} == {
        f"model.1.{name}": label for name, label in expected.items()
    }


def test_subclasses_have_the_layer_type_of_their_base():
    class MyLinear(nn.Linear):
        pass

    assert layer_type(MyLinear(1, 1)) == "linear"
    assert layer_type(nn.SyncBatchNorm(3)) == "norm"
    assert layer_type(nn.LazyLinear(3)) == "linear"
    assert layer_type(nn.Sequential()) == "other"


class Patches(nn.Module):
    """A module with its own parameters and buffers, and a child."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.index = nn.Parameter(torch.arange(6).reshape(2, 3), requires_grad=False)
        self.register_buffer("table", torch.randn(5, 5))
        self.register_buffer("scratch", torch.randn(5, 5), persistent=False)
        self.register_parameter("nothing", None)
        self.norm = nn.LayerNorm(4)


def test_a_modules_own_parameters_are_weights_if_they_are_floats_with_two_dimensions():
    found = labels_of({"model": Patches()})
    assert found["model.position"] == ("weight", "other")
    assert found["model.scale"] == ("exact", "other")
    assert found["model.index"] == ("exact", "other")
    assert found["model.table"] == ("buffer", "other")
    assert found["model.norm.weight"] == ("exact", "norm")
    assert "model.scratch" not in found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_every_float_dtype_that_can_be_quantized_are_weights(dtype):
    assert labels_of({"model": nn.Linear(2, 2).to(dtype)})["model.weight"] == ("weight", "linear")


def test_the_weight_of_an_orthogonal_parametrization_is_exact():
    """Householder reflections keep signs on its diagonal, which PyTorch truncates to integers."""
    for parametrized, role in ((parametrizations.orthogonal, "exact"), (parametrizations.spectral_norm, "weight")):
        found = labels_of({"model": parametrized(nn.Linear(64, 256))})
        assert found["model.parametrizations.weight.original"][0] == role


def test_parameters_of_other_dtypes_are_exact():
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
        assert labels_of({"model": layer})["model.weight"] == ("exact", "linear")


def test_a_tied_weight_has_the_layer_type_of_its_first_occurrence():
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 6, bias=False))
    model[1].weight = model[0].weight
    found = labels_of({"model": model})
    assert found["model.0.weight"] == ("weight", "embedding")
    assert "model.1.weight" not in found


def test_a_module_that_is_used_twice_is_labelled_once():
    layer = nn.Linear(3, 3)
    found = labels_of({"model": nn.Sequential(layer, nn.ReLU(), layer)})
    assert {name for name in found if name.startswith("model.")} == {"model.0.weight", "model.0.bias"}
    assert found["model.0.weight"] == ("weight", "linear")


def test_modules_other_than_the_model_are_exact_unless_a_pattern_matches():
    things = {"model": nn.ConvTranspose2d(2, 2, 3), "critic": nn.Conv2d(2, 2, 3)}
    assert labels_of(things)["model.weight"] == ("weight", "conv")
    assert labels_of(things)["critic.weight"] == ("exact", "conv")
    assert labels_of(things, {"critic.*": "weight"})["critic.weight"] == ("weight", "conv")


def test_a_pattern_may_use_any_name_of_a_tied_parameter():
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["tokens"].weight
    assert labels_of({"model": model}, {"*.head.weight": "exact"})["model.tokens.weight"] == ("exact", "embedding")


def test_tensors_outside_modules_are_exact():
    things = {"model": nn.Linear(2, 2), "generator": torch.Generator()}
    found = labels_of(things)
    assert found["generator"] == found["rng.torch"] == ("exact", "")


def optimizer_labels(make):
    model = nn.Linear(4, 4, bias=False)
    optimizer = make(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = labels_of({"model": model, "optimizer": optimizer})
    prefix = "optimizer.state.model.weight."
    return {name.removeprefix(prefix): role for name, (role, _) in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda p: optim.AdamW(p, amsgrad=True),
            {
                "step": "exact",
                "exp_avg": "first_moment",
                "exp_avg_sq": "second_moment",
                "max_exp_avg_sq": "second_moment",
            },
        ),
        (lambda p: optim.SGD(p, momentum=0.9), {"momentum_buffer": "first_moment"}),
        (optim.Muon, {"momentum_buffer": "first_moment"}),
        (
            lambda p: optim.RMSprop(p, momentum=0.9),
            {"step": "exact", "square_avg": "second_moment", "momentum_buffer": "first_moment"},
        ),
        (optim.Adagrad, {"step": "exact", "sum": "second_moment"}),
    ],
    ids=["AdamW", "SGD", "Muon", "RMSprop", "Adagrad"],
)
def test_moments_are_found_by_their_keys_in_the_optimizers_state(make, expected):
    assert optimizer_labels(make) == expected


class Signs(optim.Optimizer):
    """An optimizer that is not in ``torch.optim``."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                trace = self.state[parameter].setdefault("trace", torch.zeros_like(parameter))
                trace.lerp_(parameter.grad, 0.5)
                parameter.data -= group["lr"] * trace.sign()


def test_the_state_of_an_unknown_optimizer_is_exact():
    assert optimizer_labels(Signs) == {"trace": "exact"}


def test_tensors_with_names_of_moments_outside_an_optimizer_are_exact():
    tensors = {"other.state.0.exp_avg": torch.ones(2, 2), "optimizer.exp_avg": torch.ones(2, 2)}
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))])
    assert set(labels(tensors, {"optimizer": optimizer}).values()) == {Label("exact")}


# -- Overrides ----------------------------------------------------------------------------------------------------


def two_layers():
    return {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}


def test_a_pattern_sets_the_role_and_keeps_the_layer_type():
    found = labels_of(two_layers(), {"*.0.weight": "exact"})
    assert found["model.0.weight"] == ("exact", "linear")
    assert found["model.1.weight"] == ("weight", "linear")


def test_a_vector_can_be_made_a_weight():
    assert labels_of(two_layers(), {"model.?.bias": "weight"})["model.1.bias"] == ("weight", "linear")


def test_the_last_of_several_matching_patterns_counts():
    found = labels_of(two_layers(), {"model.*": "exact", "*.1.weight": "weight"})
    assert found["model.0.weight"] == ("exact", "linear")
    assert found["model.1.weight"] == ("weight", "linear")


def test_a_pattern_that_matches_nothing_is_an_error_with_an_example():
    with pytest.raises(
        StateError, match=r"roles\['\*\.head\.\*'\] matches no tensor; names look like 'model\.0\.weight'"
    ):
        labels_of(two_layers(), {"*.head.*": "exact"})


def test_patterns_are_case_sensitive():
    with pytest.raises(StateError, match="matches no tensor"):
        labels_of(two_layers(), {"MODEL.*": "exact"})


def test_an_unknown_role_is_an_error_that_lists_the_roles():
    with pytest.raises(
        StateError, match=r"'lossless' is not a role; the roles are weight, average, first_moment, .*exact"
    ):
        labels_of(two_layers(), {"model.*": "lossless"})


def test_an_integer_tensor_cannot_be_a_weight():
    with pytest.raises(StateError, match=r"model\.index is int64, which cannot be quantized"):
        labels_of({"model": Patches()}, {"*.index": "weight"})


def test_only_parameters_can_be_weights():
    with pytest.raises(StateError, match=r"model\.running_mean is not a parameter of a module"):
        labels_of({"model": nn.BatchNorm1d(2)}, {"*.running_mean": "weight"})


@pytest.mark.parametrize("role", ["first_moment", "second_moment"])
def test_tensors_of_models_cannot_be_moments(role):
    # A checkpoint drops first moments: a restore would fill the weights with zeros.
    with pytest.raises(StateError, match=r"model\.0\.bias is a tensor of a model, so it cannot be a moment"):
        labels_of(two_layers(), {"model.*": role})
