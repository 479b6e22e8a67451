"""Fills the tensors of the model and the optimizer in place if the stored ones fit. New memory would be slower."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dynaquant import kernels
from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten
from dynaquant.state.sharding import is_sharded, local_of
from dynaquant.state.tree import tensor_names_in
from dynaquant.tensors.dequantize import dequantize_into, values_of
from dynaquant.tensors.stored import External, StoredTensor
from dynaquant.training.hash_cache import HashCache
from dynaquant.training.objects import MAIN

_HYPERPARAMETER = re.compile(r"optimizer(\.[^.]+)?\.param_groups\.")
"""Names of tensors that are compared with the stored ones before a restore, so they cannot be filled early."""


def fillable_tensors(
    now: Mapping[str, Any], tree: Any, stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of the model and the optimizer that can be filled in place, by their stored names.

    now: the present states of models and optimizers. tree: of the stored state. A tensor that also belongs to an extra
    is left out, as extras are restored first. targets: the DTensors whose parts are stored. Raises KeyError, TypeError
    or ValueError for a malformed tree.
    """
    elsewhere = {name for key, node in tree["dict"] if key not in MAIN for name in tensor_names_in(node)}
    try:
        own = flatten({name: now[name] for name in MAIN if name in now})[1]
    except StateError:  # the present state cannot be saved, but the stored one may still be restored
        return {}

    def fits(name: str) -> bool:
        target, tensor = local_of(own[name]), stored[name]
        same = (target.dtype, target.shape) == (tensor.dtype, tensor.shape)
        # A second copy of what a rank holds of a model may not fit on its device.
        here = name in targets if is_sharded(own[name]) else target.device == kernels.HOST
        return same and here and target.is_contiguous()

    return {
        name: own[name]
        for name in own
        if name in stored and name not in elsewhere and fits(name) and not _HYPERPARAMETER.match(name)
    }


def unchanged_tensors(
    now: Mapping[str, Any], stored: Mapping[str, StoredTensor], hashes: HashCache
) -> dict[str, Tensor]:
    """Return the present tensors that equal the stored external tensors of the same names, by hash. No file is read.

    now: the present states of modules and optimizers.
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
        and not is_sharded(own[name])
        and (own[name].dtype, own[name].shape) == (tensor.dtype, tensor.shape)
        and hashes.of(name, own[name], always_read=True) == tensor.hash
    }


def fill(fills: Iterable[tuple[Tensor, StoredTensor]]) -> None:
    """Write the values of stored tensors into the given tensors."""
    for target, stored in fills:
        if isinstance(stored, Tensor | External) or target.device != kernels.HOST:
            target.copy_(values_of(stored))
        else:
            dequantize_into(target, stored)


def new_tensor(stored: StoredTensor) -> Tensor:
    """Return the values in new memory. Training will change them, and the stored tensor must stay unchanged."""
    if isinstance(stored, Tensor):
        return kernels.empty(stored.shape, stored.dtype).copy_(stored)
    return values_of(stored)
