"""The roles of tensors that DCP saves, of which only names and values are known, and F of the weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dynaquant.engine.label import Label
from dynaquant.interop.inferred_roles import BUFFERS, mean_of
from dynaquant.saving.source import Source
from dynaquant.state.roles import optimizer_role, quantizable

_OF_MODULES = ("weight", "bias")
_STATE = ".state."
"""Stands between the name of an optimizer and that of a parameter, as DCP names their state."""


def dcp_source(tensors: Mapping[str, Tensor]) -> Source:
    """Return tensors that DCP saves as a source. F of a weight comes from its second moment, if there is one."""
    labels = {name: _label(name, tensors) for name in tensors}
    measured = _mean_squared_gradients(tensors, labels)
    return Source(tensors=tensors, labels=labels, mean_squares=lambda _: measured)


def _label(name: str, tensors: Mapping[str, Tensor]) -> Label:
    if _STATE in f".{name}" and name.rpartition(".")[2] not in _OF_MODULES:  # a module may be called "state"
        return Label(optimizer_role(name, tensors))
    if name.rpartition(".")[2] in BUFFERS:
        return Label("buffer")
    return Label("weight" if quantizable(tensors[name], vectors=True) else "exact")


def _mean_squared_gradients(tensors: Mapping[str, Tensor], labels: Mapping[str, Label]) -> dict[str, float]:
    """Return F of the weights, from the second moments whose names end with theirs."""
    found = {}
    weights = {name: tensor for name, tensor in tensors.items() if labels[name].role == "weight"}
    by_end: dict[str, list[str]] = {}
    for name in weights:
        parts = name.split(".")
        for i in range(len(parts)):
            by_end.setdefault(".".join(parts[i:]), []).append(name)
    for name, moment in tensors.items():
        if labels[name].role == "second_moment" and moment.numel():
            parameter = f".{name}".rpartition(_STATE)[2].rpartition(".")[0]
            for weight in by_end.get(parameter, []):
                if weights[weight].shape == moment.shape:
                    found[weight] = mean_of(moment)
    return found
