"""Roles and gradients inferred from the names of tensors and their places in a state."""

import pytest
import torch
from torch import nn
from training import model_of, train

import dynaquant as dq
from dynaquant.interop import inferred_roles
from dynaquant.state.flatten import flatten


def labels_of(state) -> dict[str, tuple[str, str]]:
    tree, tensors = flatten(state)
    return {
        name: (label.role, label.layer_type) for name, label in inferred_roles.inferred_labels(tree, tensors).items()
    }


def fisher_of(state) -> dict[str, float]:
    tree, tensors = flatten(state)
    return inferred_roles.mean_squared_gradients(tree, tensors, inferred_roles.inferred_labels(tree, tensors))


def trained(make=torch.optim.AdamW):
    model = model_of(8)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    return model, optimizer


def test_floats_of_a_state_dict_are_weights_with_layer_types_from_their_names():
    state = {
        "wte.weight": torch.ones(8, 4),
        "h.0.attn.weight": torch.ones(4, 4),
        "h.0.attn.bias": torch.ones(4),
        "h.0.ln_1.weight": torch.ones(4),
        "conv.weight": torch.ones(4, 4, 3, 3),
        "bn.running_mean": torch.ones(4),
        "bn.num_batches_tracked": torch.tensor(3),
        "mask": torch.ones(4, 4, dtype=torch.bool),
        "scale": torch.tensor(1.0),
    }
    assert labels_of(state) == {
        "wte.weight": ("weight", "embedding"),
        "h.0.attn.weight": ("weight", "linear"),
        "h.0.attn.bias": ("weight", "linear"),
        "h.0.ln_1.weight": ("weight", "norm"),
        "conv.weight": ("weight", "conv"),
        "bn.running_mean": ("buffer", "norm"),
        "bn.num_batches_tracked": ("buffer", "norm"),
        "mask": ("exact", "linear"),
        "scale": ("exact", "other"),
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn, torch.uint8])
def test_dtypes_that_cannot_be_quantized_are_exact(dtype):
    assert labels_of({"w": torch.zeros(4, 4, dtype=dtype)})["w"][0] == "exact"


@pytest.mark.parametrize(
    "around",
    [
        lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 3},
        lambda model, optimizer: {
            "state_dict": model,
            "optimizer_states": [optimizer],
            "hyper_parameters": {"lr": 1.0},
        },
        lambda model, optimizer: {"trainer": {"deep": {"net": model, "opt": [(), [optimizer]]}}},
    ],
    ids=["plain", "lightning", "nested"],
)
def test_models_and_optimizers_are_found_anywhere_in_the_tree(around):
    model, optimizer = trained()
    found = labels_of(around(model.state_dict(), optimizer.state_dict()))
    roles = [role for role, _ in found.values()]
    parameters = len(list(model.parameters()))
    assert roles.count("weight") == roles.count("first_moment") == roles.count("second_moment") == parameters
    assert all(role == "exact" for name, (role, _) in found.items() if name.endswith(".step"))


def test_moments_of_other_optimizers_are_found_by_their_keys():
    for make, role in (
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "first_moment"),
        (lambda p: torch.optim.RMSprop(p, 0.1), "second_moment"),
        (lambda p: torch.optim.Adagrad(p, 0.1), "second_moment"),
    ):
        found = labels_of({"optimizer": trained(make)[1].state_dict()})
        assert role in {role for role, _ in found.values()}


@pytest.mark.parametrize(
    "others",
    [{}, {"exp_avg_sq": torch.ones(4), "GG": [torch.ones(2, 2)]}, {"exp_avg_sq": torch.ones(4), "s": torch.ones(4)}],
)
def test_moments_are_exact_beside_what_no_optimizer_of_torch_has(others):
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), **others}
    found = labels_of({"optimizer": {"state": {0: state}, "param_groups": [{"params": [0]}]}})
    assert {role for role, _ in found.values()} == {"exact"}


def test_numbers_and_master_weights_do_not_keep_moments_from_being_quantized():
    state = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4), "norm": torch.ones(1), "master": torch.ones(4)}
    found = labels_of({"optimizer": {"state": {0: state}, "param_groups": [{"params": [0]}]}})
    assert {role for role, _ in found.values()} == {"first_moment", "second_moment", "exact"}


def expected_fisher(model: nn.Module, optimizer) -> dict[str, float]:
    return {
        f"model.{name}": pytest.approx(float(optimizer.state[parameter]["exp_avg_sq"].mean()), rel=1e-5)
        for name, parameter in model.named_parameters()
    }


def test_gradients_come_from_the_optimizer_in_the_order_of_the_model():
    model, optimizer = trained()
    assert fisher_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}) == expected_fisher(
        model, optimizer
    )


def test_gradients_are_found_if_matrices_and_vectors_are_separate_groups():
    def groups(parameters):
        parameters = list(parameters)
        decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
        return torch.optim.AdamW([{"params": decayed}, {"params": [p for p in parameters if p.ndim < 2]}])

    model, optimizer = trained(groups)
    assert fisher_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}) == expected_fisher(
        model, optimizer
    )


def test_moments_that_do_not_match_give_no_gradients():
    model, optimizer = trained()
    state = optimizer.state_dict()
    assert fisher_of({"model": nn.Linear(3, 3).state_dict(), "optimizer": state}) == {}
    state["state"].popitem()
    assert fisher_of({"model": model.state_dict(), "optimizer": state}) == {}
    assert fisher_of(model.state_dict()) == {}
    assert fisher_of({}) == {}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {(0, 1): {"exp_avg_sq": torch.ones(2, 2)}, "x": 3}, "param_groups": [{"params": [(0, 1), [], {}]}]},
        {"state": {0: {"exp_avg_sq": torch.ones(2, 2)}}, "param_groups": [{"params": 5}]},
        {"state": {0: {"exp_avg_sq": 5}}, "param_groups": [{"params": [0]}, 3]},
        {"state": {0: {("a",): torch.ones(2)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: torch.ones(2)}, "param_groups": [{}]},
    ],
)
def test_states_that_only_look_like_those_of_an_optimizer_are_ignored(optimizer):
    state = {"model": {"w": torch.ones(2, 2)}, "optimizer": optimizer}
    assert labels_of(state)["model.w"] == ("weight", "linear")
    fisher_of(state)


def test_what_optimizers_add_to_roots_is_found_by_the_groups_of_their_parameters():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    groups = [{"params": model[0].parameters(), "eps": 1e-6}, {"params": model[1].parameters(), "eps": (1e-30, 1e-3)}]
    optimizer = torch.optim.AdamW([groups[0], {"params": model[1].parameters()}])
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["eps"] = groups[1]["eps"]
    tree, _ = flatten({"a": [optimizer.state_dict()]})
    assert inferred_roles.epsilons(tree) == {"a.0.state.0": 1e-6, "a.0.state.1": 1e-6}


def test_dead_rows_take_nothing_in_a_file(tmp_path):
    model = nn.Linear(64, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    sizes = []
    for dead in (0, 10):
        for moment in optimizer.state[model.weight].values():
            if moment.ndim:
                moment[:dead] = 1e-44
        dq.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.dqc")
        sizes.append((tmp_path / "s.dqc").stat().st_size)
    assert sizes[1] < 1.1 * sizes[0]
