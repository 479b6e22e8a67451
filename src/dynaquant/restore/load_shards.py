"""Loads what this rank holds of each tensor, from a checkpoint that any number of ranks has written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.forms.patchwork import patchwork
from dynaquant.engine.forms.stored import in_one
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_named
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, shard_of
from dynaquant.restore.in_place import STATE, parameters_of
from dynaquant.state.flatten import flatten
from dynaquant.state.of_ranks import is_of_a_rank
from dynaquant.store.container import CheckpointFile, Header
from dynaquant.store.reading import Tensors, load_all, load_boxes
from dynaquant.store.run import Run
from dynaquant.training.collect import collect
from dynaquant.training.objects import CHECKED


def sharded_targets(now: Mapping[str, Any], objects: Mapping[str, Any], header: Header) -> dict[str, Tensor]:
    """Return for stored tensors the DTensors whose parts this rank needs, by stored name.

    The state of an optimizer that it does not have yet will be divided as its parameter is. A stored tensor of another
    shape has no target. now: the present states of modules and optimizers. objects: of the training, by name.
    """
    own: dict[str, Tensor] = {}
    with suppress(StateError):  # what cannot be saved now may still be restored
        own.update(flatten(now)[1])
    if not any(map(is_sharded, own.values())):
        return {}
    for name, thing in objects.items():
        if not isinstance(thing, CHECKED):
            with suppress(Exception):
                own.update(flatten(collect({name: thing}))[1])
    parameters = parameters_of(objects)
    found: dict[str, Tensor] = {}
    for entry in header.entries:
        if is_of_a_rank(entry.name):  # of a plain tensor
            continue
        target = own.get(entry.name)
        if target is None and STATE in entry.name:
            target = parameters.get(entry.name.partition(STATE)[2].rpartition(".")[0])
        if target is not None and is_sharded(target) and target.shape == entry.shape:
            found[entry.name] = target
    return found


def load_shards(
    run: Run, file: CheckpointFile, targets: Mapping[str, Tensor], leave_out: Collection[str] = ()
) -> Tensors:
    """Decode what this rank holds of a checkpoint's tensors, each checked against its hash.

    targets: DTensors of the stored shapes, by stored name; other tensors are decoded as a whole. leave_out: names of
    tensors that are not decoded. Raises CheckpointError if a tensor is damaged.
    """
    chain, names = run.chain(file), [entry.name for entry in file.header.entries if entry.name not in leave_out]
    shards = {n: shard_of(targets[n]) for n in names if n in targets and not file.header.by_name[n].omitted}
    found = load_all(chain, [name for name in names if name not in shards], _native.threads())
    wanted = {name: [box for box, _ in shard.boxes] for name, shard in shards.items()}
    wanted.update({name: [Box.whole(shard.shape)] for name, shard in shards.items() if not shard.shape.numel()})
    for name, stored in load_boxes(chain, wanted.items()):
        shard, dtype = shards[name], dtype_named(file.header.by_name[name].dtype)
        if not stored:
            found[name] = torch.empty(shard.local_shape, dtype=dtype)
        elif shard.is_whole:
            found[name] = stored[0]
        else:
            locals_ = [(local, each) for (_, local), each in zip(shard.boxes, stored, strict=True)]
            found[name] = in_one(patchwork(dtype, shard.local_shape, locals_))
    return {name: found[name] for name in names}
