"""Finds the first moments that a checkpoint does not keep, so that a restore has set them to zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from torch import Tensor

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import form_of
from dynaquant.engine.reduction import Numbers
from dynaquant.ranks.group import Group
from dynaquant.store.container import CheckpointFile
from dynaquant.training.collect import parameter_names
from dynaquant.training.first_moments import corrected_keys
from dynaquant.training.objects import optimizers_of
from dynaquant.training.optimizers import keys_of


def dropped_moments(
    objects: Mapping[str, Any], tensors: Mapping[str, StoredTensor], restored: Collection[str], group: Group
) -> dict[str, set[Tensor]]:
    """Return for every optimizer, by name, the parameters whose first moments were dropped. Collective.

    tensors: as the checkpoint stores them, what this rank holds of them. restored: names of the tensors that models and
    optimizers got.
    """
    optimizers = optimizers_of(objects)
    names = parameter_names(objects)
    moments = [
        (name, parameter, full)
        for name, optimizer in optimizers.items()
        for group_, keys in zip(optimizer.param_groups, keys_of(names[name]), strict=True)
        for parameter, key in zip(group_["params"], keys, strict=True)
        for moment in corrected_keys()
        if (full := f"{name}.state.{key}.{moment}") in restored and full in tensors and parameter.numel()
    ]
    found: dict[str, set[Tensor]] = {name: set() for name in optimizers}
    has_values = {full: float(form_of(tensors[full]).has_values()) for _, _, full in moments}
    everywhere = _union(list(has_values), group)  # with strict=False, ranks may have restored different tensors
    highest = group.reduce(Numbers(highest=np.array([has_values.get(full, 0.0) for full in everywhere]))).highest
    kept = dict(zip(everywhere, highest, strict=True))
    for name, parameter, full in moments:
        if not kept[full]:
            found[name].add(parameter)
    return found


def _union(names: list[str], group: Group) -> list[str]:
    """Return the names that any rank has, in the same order on all ranks. Collective."""
    digests = group.all_gather(blake3(repr(names).encode()).digest())
    if all(digest == digests[0] for digest in digests):
        return names
    return list(dict.fromkeys(name for each in group.all_gather(names) for name in each))


def names_of_dropped(chain: Sequence[CheckpointFile]) -> frozenset[str]:
    """Return the names of the first moments that a checkpoint stores as nothing but zeros. Reads only headers.

    chain: of the checkpoint (``Run.chain``).
    """
    entries = chain[0].header.entries
    return frozenset(e.name for e in entries if e.label.role == "first_moment" and _has_no_levels(chain, e.name))


def _has_no_levels(chain: Sequence[CheckpointFile], name: str) -> bool:
    """Whether a tensor is quantized, and all its values are zero: it has neither bins nor outliers."""
    for file in chain:
        if not (scheme := file.header.by_name[name].scheme).is_reference:
            return scheme.is_zero
    return False
