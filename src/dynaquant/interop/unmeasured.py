"""Quantizes a state of which only names and tensors are known, without a metric: weights by how far they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.form import Form
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.grid_weights import grid_weights
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.interop.inferred_roles import BUFFERS
from dynaquant.saving.presets import Preset
from dynaquant.search.judge import DISTORTION_SCALE
from dynaquant.state.roles import optimizer_role, quantizable

_OF_MODULES = ("weight", "bias")
_STATE = ".state."
"""Stands between the name of an optimizer and that of a parameter, as DCP names their state."""


@dataclass(frozen=True)
class QuantizedState:
    """What is quantized of a state, by name; all else is stored exactly. rungs: of the weights' grids."""

    quantized: dict[str, Form]
    labels: dict[str, Label]
    rungs: dict[str, int]


def quantize_state(tensors: Mapping[str, Tensor], preset: Preset | None, rungs: Mapping[str, int]) -> QuantizedState:
    """Quantize weights and moments, or nothing without a preset.

    rungs: of the last checkpoint; where possible a tensor keeps its grid step.

    The sensitivity to a weight comes from its second moment, if the state has one of the same shape.
    """
    labels = {name: _label(name, tensors) for name in tensors}
    if preset is None:
        return QuantizedState({}, labels, {})
    weights = grid_weights(
        {name: tensor for name, tensor in tensors.items() if labels[name].role == "weight"},
        _mean_squared_gradients(tensors, labels),
        rungs,
        0,
        step_limits=preset.step_limits,
    )
    configuration = GridConfiguration(weights.scale_exponent_for(preset.max_degradation / DISTORTION_SCALE))
    moments = quantize_moments(tensors, labels, preset.first_tolerance, preset.second_tolerance)
    return QuantizedState({**weights.quantize(configuration), **moments}, labels, weights.rungs(configuration))


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
                    found[weight] = kernels.for_device(moment.device).sums(moment)[0] / moment.numel()
    return found
