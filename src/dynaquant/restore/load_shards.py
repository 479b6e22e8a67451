"""Loads what this rank holds of each tensor, from a checkpoint that any number of ranks has written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from dynaquant.restore.in_place import STATE
from dynaquant.state.flatten import flatten
from dynaquant.state.of_ranks import is_of_a_rank
from dynaquant.state.wrappers import parameters_in
from dynaquant.store.container import CheckpointFile, Header
from dynaquant.store.entry import Entry
from dynaquant.store.reading import Tensors, load_all, load_boxes
from dynaquant.store.run import Run
from dynaquant.training.collect import collect
from dynaquant.training.objects import CHECKED


@dataclass(frozen=True)
class Targets:
    """The DTensors whose parts this rank needs of stored tensors, by stored name.

    whole: names of stored tensors that were divided among ranks, and of which nothing says how they are divided now. In
    a sharded training, code that expects a DTensor fails on what comes back.
    """

    tensors: Mapping[str, Tensor]
    whole: Sequence[str] = ()

    def problems(self, selected: Collection[str]) -> list[str]:
        """Return what comes back whole of objects, as problems. selected: names of the objects."""
        prefixes = tuple(f"{name}." for name in selected)
        return [
            f"{name} was a DTensor, and nothing says how to divide it now; make it before the restore, as an optimizer "
            "step or the first update of an average does"
            for name in self.whole
            if name.startswith(prefixes)
        ]


def sharded_targets(now: Mapping[str, Any], objects: Mapping[str, Any], header: Header) -> Targets:
    """Return the DTensors whose parts this rank needs.

    The state of an optimizer that it does not have yet will be divided as its parameter is. A stored tensor of another
    shape has no target. now: the present states of modules and optimizers. objects: of the training, by name.
    """
    own: dict[str, Tensor] = {}
    with suppress(StateError):  # what cannot be saved now may still be restored
        own.update(flatten(now)[1])
    if not any(map(is_sharded, own.values())):
        return Targets({})
    for name, thing in objects.items():
        if not isinstance(thing, CHECKED):
            with suppress(Exception):
                own.update(flatten(collect({name: thing}))[1])
    parameters = parameters_in(objects, remove_duplicate=False)
    found: dict[str, Tensor] = {}
    whole: list[str] = []
    for entry in header.entries:
        if is_of_a_rank(entry.name):  # of a plain tensor
            continue
        target = own.get(entry.name)
        if target is None and STATE in entry.name:
            target = parameters.get(entry.name.partition(STATE)[2].rpartition(".")[0])
        if target is not None and is_sharded(target) and target.shape == entry.shape:
            found[entry.name] = target
        elif (target is None or target.shape != entry.shape) and entry.name not in own and _is_divided(entry, header):
            whole.append(entry.name)  # the state of a parameter that is not divided comes back whole, too
    return Targets(found, whole)


def _is_divided(entry: Entry, header: Header) -> bool:
    number = entry.scheme.layout_number
    return number is not None and len(header.layouts[number]) > 1


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
