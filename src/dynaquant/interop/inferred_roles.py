"""Roles, layer types and gradients of a state of which only the tensors' names and places are known (files of others).

``roles.labels`` asks the modules and optimizers themselves; here there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dynaquant import kernels
from dynaquant.state.roles import Label, optimizer_role, quantizable
from dynaquant.state.tree import dict_items, tensor_name, tensor_names_in

BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")
"""Last parts of the names of tensors that are statistics or constants, not weights."""
_EMBEDDINGS = ("embed", "wte", "wpe", "tokens", "positions")
_NORMS = ("norm", "ln", "bn")


@dataclass
class _Found:
    """The dictionaries of a tree: those that hold nothing but tensors, and the states of optimizers."""

    state_dicts: list[dict[str, str]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)


def labels(tree: Any, tensors: Mapping[str, Tensor], weights: Collection[str] | None = None) -> dict[str, Label]:
    """The label of every tensor. tree, tensors: of a state, as from ``state.flatten``. weights: names of those that can
    be weights, None for all.

    Floating-point tensors in dictionaries of nothing but tensors are weights, unless they are called like a buffer;
    moments are known by their keys in the state of an optimizer (a dictionary of ``state`` and ``param_groups``).
    Everything else is exact.
    """
    found = _look_through(tree)
    result = {name: Label("exact") for name in tensors}
    for state_dict in found.state_dicts:
        for name in state_dict.values():
            if weights is not None and name not in weights:
                continue
            tensor = tensors[name]
            kind = _layer_type(name, tensor, tensors)
            if name.rpartition(".")[2] in BUFFERS:
                result[name] = Label("buffer", kind)
            elif quantizable(tensor, vectors=True):
                result[name] = Label("weight", kind)
            else:
                result[name] = Label("exact", kind)
    for optimizer in found.optimizers:
        for name in tensor_names_in(optimizer["state"]):
            result[name] = Label(optimizer_role(name, tensors))
    return result


def optimizers_in(tree: Any) -> list[dict[str, Any]]:
    """The nodes of the states of optimizers in a tree, by their keys."""
    return _look_through(tree).optimizers


def mean_squared_gradients(tree: Any, tensors: Mapping[str, Tensor], labels: Mapping[str, Label]) -> dict[str, float]:
    """F of the weights of a state, by the second moments of an optimizer in it; empty where they cannot be matched.

    An optimizer numbers its parameters in the order of the model, or of its groups: matrices before vectors, say. A
    match is one in which all shapes agree; weights may be left over, as frozen ones are, or the copy of a tied one.
    """
    found = _look_through(tree)
    for optimizer in found.optimizers:
        moments = [tensors[name] for name in _second_moments(optimizer)]
        if not moments:
            continue
        for state_dict in found.state_dicts:
            names = [name for name in dict.fromkeys(state_dict.values()) if labels[name].role == "weight"]
            for order in (names, sorted(names, key=lambda name: tensors[name].ndim < 2)):
                if matched := _matched(order, tensors, moments):
                    sums = (kernels.for_device(moment.device).sums(moment)[0] / moment.numel() for moment in moments)
                    return dict(zip(matched, sums, strict=True))
    return {}


def _matched(names: list[str], tensors: Mapping[str, Tensor], moments: list[Tensor]) -> list[str]:
    """The weights that the moments belong to, in their order; weights between them may have none. Empty if it fails."""
    matched: list[str] = []
    for name in names:
        if len(matched) < len(moments) and tensors[name].shape == moments[len(matched)].shape:
            matched.append(name)
    return matched if len(matched) == len(moments) else []


def _second_moments(optimizer: Mapping[str, Any]) -> list[str]:
    """The names of the second moments of an optimizer's parameters, in its order; empty when one has none."""
    states = {str(key): _by_text(node) for key, node in dict_items(optimizer["state"])}
    groups = [_by_text(group).get("params") for group in optimizer["param_groups"]]
    moments = []
    for number in (number for params in groups if isinstance(params, list) for number in params):
        state = states.get(str(number), {})  # DCP makes text of numbers
        name = tensor_name(state.get("exp_avg_sq", state.get("square_avg")))
        if name is None:
            return []
        moments.append(name)
    return moments


def _by_text(node: Any) -> dict[str, Any]:
    """A dictionary's node by its keys as text, as a key may be anything."""
    return {str(key): value for key, value in dict_items(node)}


def _look_through(tree: Any) -> _Found:
    found = _Found()

    def look(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                look(item)
            return
        pairs = dict_items(node)
        if not pairs:
            return
        content = {key: value for key, value in pairs if type(key) is str}
        if isinstance(content.get("param_groups"), list) and dict_items(content.get("state")):
            found.optimizers.append(content)
        elif all(tensor_name(value) is not None for _, value in pairs):
            found.state_dicts.append({str(key): tensor_name(value) or "" for key, value in pairs})
        else:
            for _, value in pairs:
                look(value)

    look(tree)
    return found


def _layer_type(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str:
    lower = name.lower()
    if tensor.ndim >= 2:
        if tensor.ndim == 2:
            return "embedding" if any(word in lower for word in _EMBEDDINGS) else "linear"
        return "conv"
    if any(word in part for part in lower.split(".") for word in _NORMS):
        return "norm"
    weight = f"{name.rpartition('.')[0]}.weight"
    return _layer_type(weight, tensors[weight], tensors) if weight != name and weight in tensors else "other"
