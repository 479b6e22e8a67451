"""Infers roles, layer types and gradients from the names of tensors and their places in the tree.

``state/roles.py`` looks at modules and optimizers instead, but another program's file comes without these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.label import Label
from dynaquant.state.roles import optimizer_role, quantizable
from dynaquant.state.tree import dict_items, tensor_name, tensor_names_in
from dynaquant.training.optimizers import PARAMETER_SHAPED, epsilon_in

BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")
"""Last parts of the names of tensors that are statistics or constants, not weights."""
_OF_TORCH = PARAMETER_SHAPED | {"row_var", "col_var", "variance"}
"""Keys of tensors in the states of ``torch.optim``'s optimizers."""
_EMBEDDINGS = ("embed", "wte", "wpe", "tokens", "positions")
_NORMS = ("norm", "ln", "bn")


def inferred_labels(
    tree: Any,
    tensors: Mapping[str, Tensor],
    vectors: bool = True,
    weights: Collection[str] | None = None,
    averages: Collection[str] = (),
) -> dict[str, Label]:
    """Return the label of every tensor of a state.

    Floating-point tensors in dictionaries that hold only tensors are weights, unless their name is in ``BUFFERS``.
    Moments are found by their keys in the state of an optimizer (a dictionary with ``state`` and ``param_groups``), if
    it has only what optimizers of ``torch.optim`` have. Everything else is exact.

    tree, tensors: as ``flatten`` returns them. vectors: whether tensors of one dimension are weights.
    weights: names of the tensors that can be weights, None for all. averages: of those that can be averages of weights.
    """
    result = {name: Label("exact") for name in tensors}
    for state_dict in _found(tree, "state dict"):
        for name in state_dict.values():
            is_average = name in averages
            if weights is not None and name not in weights and not is_average:
                continue
            tensor = tensors[name]
            kind = _layer_type(name, tensor, tensors)
            if name.rpartition(".")[2] in BUFFERS:
                result[name] = Label("buffer", kind)
            elif quantizable(tensor, vectors):
                result[name] = Label("average" if is_average else "weight", kind)
            else:
                result[name] = Label("exact", kind)
    for optimizer in optimizers_in(tree):
        known = _is_like_torchs(optimizer, tensors)
        for name in tensor_names_in(optimizer["state"]):
            result[name] = Label(optimizer_role(name, tensors) if known else "exact")
    return result


def _is_like_torchs(optimizer: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether an optimizer's state has only what those of ``torch.optim`` have, besides numbers and master weights.

    Whatever else it has, its moments may be used otherwise. So may an ``exp_avg`` that nothing divides (Lion).
    """
    for node in (node for _, node in dict_items(optimizer["state"])):
        state = _by_text_key(node)
        large = {key for key, inner in state.items() if any(tensors[n].numel() > 1 for n in tensor_names_in(inner))}
        if any(key not in _OF_TORCH and "master" not in key for key in large):
            return False
        if "exp_avg" in large and not large & {"exp_avg_sq", "exp_inf"}:
            return False
    return True


def optimizers_in(tree: Any) -> list[dict[str, Any]]:
    """Return the states of optimizers in a tree, each as its nodes by key."""
    return _found(tree, "optimizer")


def mean_squared_gradients(tree: Any, tensors: Mapping[str, Tensor], labels: Mapping[str, Label]) -> dict[str, float]:
    """Return F (the mean squared gradient) of the weights, from the second moments of an optimizer in the state.

    An optimizer numbers its parameters in the order of the model or of its groups, e.g. matrices before vectors. In a
    match all shapes are equal. Some weights may have no moment: frozen ones, or the second name of a tied one. Returns
    an empty dictionary if no optimizer matches.
    """
    for optimizer in optimizers_in(tree):
        moments = [tensors[name] for name in _second_moments(optimizer)]
        if not moments:
            continue
        for state_dict in _found(tree, "state dict"):
            names = [name for name in dict.fromkeys(state_dict.values()) if labels[name].role == "weight"]
            for order in (names, sorted(names, key=lambda name: tensors[name].ndim < 2)):
                if matched := _matched(order, tensors, moments):
                    return dict(zip(matched, map(mean_of, moments), strict=True))
    return {}


def epsilons(tree: Any) -> dict[str, float]:
    """Return what the optimizers of a state add to the roots of second moments, as for ``quantize_moments``."""
    found: dict[str, float] = {}
    for optimizer in optimizers_in(tree):
        of_key: dict[str, float] = {}
        for group in map(_by_text_key, optimizer["param_groups"]):
            epsilon, parameters = epsilon_in(group), group.get("params")
            if epsilon and isinstance(parameters, list):
                of_key |= dict.fromkeys(map(str, parameters), epsilon)
        for key, node in dict_items(optimizer["state"]):
            if (own := of_key.get(str(key))) is not None:
                found |= {name.rpartition(".")[0]: own for name in tensor_names_in(node)}
    return found


def mean_of(moment: Tensor) -> float:
    """Return the mean of the values of a second moment."""
    return float(kernels.for_device(moment.device).total(moment)) / moment.numel()


def _matched(names: list[str], tensors: Mapping[str, Tensor], moments: list[Tensor]) -> list[str]:
    """Return the names of the weights that the moments belong to, in the same order; empty if they do not match."""
    matched: list[str] = []
    for name in names:
        if len(matched) < len(moments) and tensors[name].shape == moments[len(matched)].shape:
            matched.append(name)
    return matched if len(matched) == len(moments) else []


def _second_moments(optimizer: Mapping[str, Any]) -> list[str]:
    """Return the names of the second moments, in the order of the parameters; empty if a parameter has none."""
    states = {str(key): _by_text_key(node) for key, node in dict_items(optimizer["state"])}
    groups = [_by_text_key(group).get("params") for group in optimizer["param_groups"]]
    moments = []
    for number in (number for params in groups if isinstance(params, list) for number in params):
        state = states.get(str(number), {})  # DCP turns numbers into text
        name = tensor_name(state.get("exp_avg_sq", state.get("square_avg")))
        if name is None:
            return []
        moments.append(name)
    return moments


def _by_text_key(node: Any) -> dict[str, Any]:
    """Return the values of a dictionary's node by key. A key may be of any type, so all are made text."""
    return {str(key): value for key, value in dict_items(node)}


def _found(tree: Any, kind: Literal["state dict", "optimizer"]) -> list[dict[str, Any]]:
    """Return the dictionaries in a tree that hold only tensors, as names by key, or the states of optimizers."""
    return [content for found, content in _recognized(tree) if found == kind]


def _recognized(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    items = node.get("tuple") if isinstance(node, dict) else node
    if isinstance(items, list):
        for item in items:
            yield from _recognized(item)
        return
    if not (pairs := dict_items(node)):
        return
    content = {key: value for key, value in pairs if type(key) is str}
    if isinstance(content.get("param_groups"), list) and dict_items(content.get("state")):
        yield "optimizer", content
    elif all(tensor_name(value) is not None for _, value in pairs):
        yield "state dict", {str(key): tensor_name(value) for key, value in pairs}
    else:
        for _, value in pairs:
            yield from _recognized(value)


def _layer_type(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str:
    lower = name.lower()
    if tensor.ndim > 2:
        return "conv"
    if tensor.ndim == 2:
        return "embedding" if any(word in lower for word in _EMBEDDINGS) else "linear"
    if any(word in part for part in lower.split(".") for word in _NORMS):
        return "norm"
    weight = f"{name.rpartition('.')[0]}.weight"
    return _layer_type(weight, tensors[weight], tensors) if weight != name and weight in tensors else "other"
