"""A state that was read, or handed over as a whole or by DCP: as a source of a checkpoint, and what a metric scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from dynaquant.engine import kernels
from dynaquant.engine.kernels.reused import ReusedMemory
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.candidate import CandidateWeights, values
from dynaquant.errors import EvaluateError
from dynaquant.interop import inferred_roles
from dynaquant.interop.whole_state import WholeState
from dynaquant.saving.source import Source
from dynaquant.search.evaluation import Evaluate, ParameterValues, number_of
from dynaquant.state.flatten import unflatten
from dynaquant.state.roles import optimizer_role, quantizable
from dynaquant.state.tree import tensor_names_in
from dynaquant.training.snapshot import Snapshot

Tell = Callable[[str], None]
"""Called with texts that report progress."""
_OF_MODULES = ("weight", "bias")
_STATE = ".state."
"""Stands between the name of an optimizer and that of a parameter, as DCP names their state."""


def source_of(state: WholeState, vectors: bool, exact_optimizers: Mapping[str, str]) -> Source:
    """Return a state as a source. Roles and F are inferred from names, places in the tree and second moments.

    vectors: whether tensors of one dimension are weights. exact_optimizers: names of optimizers in the state whose
    moments are stored exactly, each with the reason.
    """
    labels = inferred_roles.inferred_labels(state.tree, state.tensors, vectors, state.weights, state.averages)
    exact = tuple(f"{name}." for name in exact_optimizers)
    labels |= {name: Label("exact") for name in labels if name.startswith(exact)}
    notes = [
        f"the moments of {name} are stored exactly, as they may not be used as Adam does: {reason}"
        for name, reason in exact_optimizers.items()
    ]

    def mean_squares(_weights: Mapping[str, Tensor]) -> Mapping[str, float]:
        # If weights are not in the model's order, moments could be matched with the wrong weights.
        return inferred_roles.mean_squared_gradients(state.tree, state.tensors, labels) if state.in_order else {}

    return Source(
        tensors=state.tensors,
        labels=labels,
        on_access=True,
        vectors_count_more=True,
        mean_squares=mean_squares,
        epsilons=inferred_roles.epsilons(state.tree),
        notes=[*state.notes, *notes],
    )


def dcp_source(tensors: Mapping[str, Tensor]) -> Source:
    """Return tensors that DCP saves, of which only names and values are known, as a source.

    F of a weight comes from its second moment, if there is one.
    """
    labels = {name: _dcp_label(name, tensors) for name in tensors}
    measured = _dcp_mean_squares(tensors, labels)
    return Source(tensors=tensors, labels=labels, mean_squares=lambda _: measured)


def _dcp_label(name: str, tensors: Mapping[str, Tensor]) -> Label:
    if _STATE in f".{name}" and name.rpartition(".")[2] not in _OF_MODULES:  # a module may be called "state"
        return Label(optimizer_role(name, tensors))
    if name.rpartition(".")[2] in inferred_roles.BUFFERS:
        return Label("buffer")
    return Label("weight" if quantizable(tensors[name], vectors=True) else "exact")


def _dcp_mean_squares(tensors: Mapping[str, Tensor], labels: Mapping[str, Label]) -> dict[str, float]:
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
                    found[weight] = inferred_roles.mean_of(moment)
    return found


class StateSubject:
    """A state as the ``Subject`` of a metric, which gets it as ``dynaquant.load`` would return it."""

    def __init__(self, state: WholeState, tell: Tell) -> None:
        self._state, self._tell, self._count = state, tell, itertools.count(1)
        self.module = nn.Module()

    def values(self, candidate: CandidateWeights, reused: ReusedMemory) -> dict[str, ParameterValues]:
        """Return functions for the values of a candidate's weights."""
        return {
            name: partial(values, tensor, kernels.HOST, partial(reused.empty, name))
            for name, tensor in candidate.items()
        }

    def score(self, values: Mapping[str, ParameterValues], evaluate: Evaluate) -> float:
        """Return the metric of the state with other values for some tensors. It may write to what it gets.

        When this returns or raises, the global random number generators are as before. Raises EvaluateError if the
        metric fails on the state itself, or is not finite there.
        """
        if values:
            return self._score(values, evaluate)
        try:
            found = self._score({}, evaluate)
        except Exception as error:
            raise EvaluateError(f"the metric failed on the original weights ({error!r})") from error
        if not math.isfinite(found):
            raise EvaluateError(f"the metric of the original weights is {found}; it must be finite")
        return found

    def _score(self, values: Mapping[str, ParameterValues], evaluate: Evaluate) -> float:
        self._tell(f"evaluating: {next(self._count)}")
        tensors = self._state.tensors

        def copied(name: str) -> Tensor:
            value = values.get(name)
            if value is None:
                return tensors[name].clone()
            return (value if isinstance(value, Tensor) else value()).to(tensors[name].dtype, copy=True)

        before = Snapshot(self.module)
        try:
            with torch.no_grad():
                copy = unflatten(self._state.tree, {name: copied(name) for name in tensor_names_in(self._state.tree)})
                return number_of(evaluate(copy), "the metric")
        finally:
            before.put_back_surely()
