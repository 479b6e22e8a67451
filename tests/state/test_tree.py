"""Queries on the JSON tree of a state: its model, its tensors, its depth."""

import pytest
import torch

from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten, unflatten
from dynaquant.state.tree import (
    MAX_DEPTH,
    is_too_deep,
    model_in,
    state_dict_in,
    state_dict_tree,
    tensor_names_in,
    without_tensors,
)


def tree_of(state):
    return flatten(state)[0]


def test_the_model_is_found_under_the_usual_keys_or_is_the_whole_state():
    weights = {"w": torch.ones(2)}
    for key in ("model", "state_dict", "model_state_dict", "module", "model_state"):
        assert state_dict_in(tree_of({"epoch": 3, key: weights})) == {"w": f"{key}.w"}
    assert state_dict_in(tree_of(weights)) == {"w": "w"}
    assert state_dict_in(state_dict_tree(["a.b", "c"])) == {"a.b": "a.b", "c": "c"}


def test_keys_of_several_models_begin_with_the_models_name():
    models = {"D": {"w": torch.ones(2)}, "G": {"w": torch.ones(3)}}
    assert state_dict_in(tree_of({"model": models})) == {"D.w": "model.D.w", "G.w": "model.G.w"}


def test_a_state_without_a_model_is_an_error_that_lists_its_keys():
    with pytest.raises(StateError, match="there is no model in it; it has epoch, best"):
        model_in(tree_of({"epoch": 3, "best": [1]}))
    with pytest.raises(StateError, match="there is no model in it; it has no entries"):
        model_in(tree_of(3))


def test_a_state_dict_with_a_plain_value_is_an_error_that_names_it():
    with pytest.raises(StateError, match="epoch in the model is not a tensor"):
        state_dict_in(tree_of({"w": torch.ones(2), "epoch": 3}))


def test_tensor_names_are_listed_in_order_and_include_arrays():
    state = {"b": [torch.ones(1), (torch.ones(2),)], "a": torch.ones(3).numpy(), "c": 3}
    tree, tensors = flatten(state)
    assert list(tensor_names_in(tree)) == list(tensors) == ["b.0", "b.1.0", "a"]


def test_tensors_can_be_removed_from_dictionaries():
    tree, tensors = flatten({"model": {"w": torch.ones(2), "v": torch.ones(3)}, "epoch": 3})
    state = unflatten(without_tensors(tree, {"model.w"}), tensors)
    assert list(state["model"]) == ["v"]
    assert state["epoch"] == 3


@pytest.mark.parametrize("wrap", [lambda n: [n], lambda n: {"tuple": [n]}, lambda n: {"dict": [["key", n]]}])
def test_a_tree_with_one_container_more_than_allowed_is_too_deep(wrap):
    tree = 0
    for _ in range(MAX_DEPTH):
        tree = wrap(tree)
    assert not is_too_deep(tree)
    assert is_too_deep(wrap(tree))
