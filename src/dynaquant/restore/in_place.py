"""Where restored tensors go: into the memory of the model and the optimizer, wherever it fits; new memory is slower."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dynaquant import kernels
from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten
from dynaquant.state.tree import tensor_names_in
from dynaquant.tensors.dequantize import dequantize_into, values_of
from dynaquant.tensors.stored import External, StoredTensor
from dynaquant.training.changes import HashCache
from dynaquant.training.objects import MAIN

_HYPERPARAMETER = re.compile(r"optimizer(\.[^.]+)?\.param_groups\.")
"""Names of tensors that are compared before it is decided whether they are restored, so they are not filled."""


def places(now: Mapping[str, Any], tree: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors of the model and the optimizer that can be filled with what is stored of them, by its name.

    now: the states of both, as they are. tree: of the stored state; what other parts of it hold as well is restored
    before, and not among them. Raises KeyError, TypeError or ValueError for one that is no state.
    """
    elsewhere = {name for key, node in tree["dict"] if key not in MAIN for name in tensor_names_in(node)}
    try:
        own = flatten({name: now[name] for name in MAIN if name in now})[1]
    except StateError:  # what can be restored may stand where something is that cannot be saved
        return {}

    def fits(name: str) -> bool:
        place, tensor = own[name], stored[name]
        same = (place.dtype, place.shape, place.device) == (tensor.dtype, tensor.shape, kernels.HOST)
        return same and place.is_contiguous()

    return {
        name: own[name]
        for name in own
        if name in stored and name not in elsewhere and fits(name) and not _HYPERPARAMETER.match(name)
    }


def already_there(now: Mapping[str, Any], stored: Mapping[str, StoredTensor], hashes: HashCache) -> dict[str, Tensor]:
    """The tensors of modules that have the values that the stored external ones of their names have, by their hashes.

    now: the states of the modules and optimizers, as they are.
    """
    external = {name: tensor for name, tensor in stored.items() if isinstance(tensor, External)}
    if not external:
        return {}
    try:
        own = flatten(now)[1]
    except StateError:
        return {}
    return {
        name: own[name]
        for name, tensor in external.items()
        if name in own
        and (own[name].dtype, own[name].shape) == (tensor.dtype, tensor.shape)
        and hashes.of(name, own[name], always_read=True) == tensor.hash
    }


def fill(fills: Iterable[tuple[Tensor, StoredTensor]]) -> None:
    """Writes the values of stored tensors to where they fit."""
    for place, stored in fills:
        if isinstance(stored, Tensor | External):
            place.copy_(values_of(stored))
        else:
            dequantize_into(place, stored)


def new(stored: StoredTensor) -> Tensor:
    """The values in memory of their own. They will be trained on, while what is stored has to stay as it is."""
    if isinstance(stored, Tensor):
        return kernels.empty(stored.shape, stored.dtype).copy_(stored)
    return values_of(stored)
