"""Fills the tensors of the model and the optimizer in place if the stored ones fit. New memory would be slower."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.external import externals
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.tensors.strides import Strides, strides_of, with_strides
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, local_of
from dynaquant.state.flatten import flatten
from dynaquant.state.tree import objects_in, strides_in, tensor_names_in
from dynaquant.state.wrappers import parameters_in
from dynaquant.training.hash_cache import HashCache
from dynaquant.training.objects import MAIN

_HYPERPARAMETER = re.compile(r"optimizer(\.[^.]+)?\.param_groups\.")
"""Names of tensors that are compared with the stored ones before a restore, so they cannot be filled early."""
STATE = ".state."
"""Stands between the name of an optimizer and that of a parameter, in the name of a tensor."""


def wanted_strides(
    tree: Any, stored: Mapping[str, StoredTensor], objects: Mapping[str, Any], targets: Mapping[str, Tensor]
) -> dict[str, Strides]:
    """Return the strides that restored tensors get, by stored name; without those in C order.

    A tensor gets the strides that it had. State that had the shape and the strides of its parameter gets those that the
    parameter has now: fused optimizers go through both in the order of memory. tree: of the stored state. targets: the
    DTensors whose parts are stored.
    """
    before, parameters = strides_in(tree), parameters_in(objects, remove_duplicate=False)
    wanted = {name: strides for name, strides in before.items() if name not in targets}
    for name, tensor in stored.items():
        path = name.partition(STATE)[2].rpartition(".")[0]
        parameter = parameters.get(path)
        if parameter is None or before.get(name) != before.get(path):
            continue
        own = local_of(parameter)
        if own.shape == tensor.shape and is_sharded(parameter) == (name in targets):
            wanted.pop(name, None)
            if (strides := strides_of(own)) is not None:
                wanted[name] = strides
    return wanted


def fillable_tensors(
    now: Mapping[str, Any],
    tree: Any,
    stored: Mapping[str, StoredTensor],
    targets: Mapping[str, Tensor],
    strides: Mapping[str, Strides],
) -> dict[str, Tensor]:
    """Return the tensors of the model and the optimizer that can be filled in place, by their stored names.

    now: the present states of models and optimizers. tree: of the stored state. A tensor that also belongs to an extra
    is left out, as extras are restored first. targets: the DTensors whose parts are stored. strides: of those that are
    not to be in C order. Raises KeyError, TypeError or ValueError for a malformed tree.
    """
    elsewhere = {name for key, node in tree["dict"] if key not in MAIN for name in tensor_names_in(node)}
    # A restore makes new objects, and leaves the present ones alone.
    elsewhere.update(name for node in objects_in(tree) for name in tensor_names_in(node))
    try:
        own = flatten({name: now[name] for name in MAIN if name in now})[1]
    except StateError:  # the present state cannot be saved, but the stored one may still be restored
        return {}

    def fits(name: str) -> bool:
        target, tensor = local_of(own[name]), stored[name]
        same = (target.dtype, target.shape) == (tensor.dtype, tensor.shape)
        # A second copy of what a rank holds of a model may not fit on its device.
        here = name in targets if is_sharded(own[name]) else kernels.fills(target.device)
        return same and here and target.is_contiguous() and name not in strides

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
    external = externals(stored)
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


def new_tensor(stored: StoredTensor, strides: Strides | None = None) -> Tensor:
    """Return the values in new memory. Training will change them, and the stored tensor must stay unchanged.

    Raises ValueError for strides that the tensor cannot have.
    """
    values = values_of(stored)
    if strides is not None:
        values = with_strides(values, strides)
    return kernels.empty(values.shape, values.dtype).copy_(values) if values is stored else values
