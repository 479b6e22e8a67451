"""Compares the weights of a checkpoint with a model, without the training that made them: what can be loaded where."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from dynaquant.errors import CheckpointError, StateError
from dynaquant.ranks.dtensors import is_sharded, tied_keys
from dynaquant.state.of_ranks import ranks_in
from dynaquant.state.subclasses import CLASS, description_problem, descriptions_in, owner_of
from dynaquant.state.tree import dict_items, metadata_in, model_in, state_dict_in
from dynaquant.state.wrappers import bare, may_rename, state_dict, unwrapped_name
from dynaquant.store.container import CheckpointFile
from dynaquant.training.hash_cache import HashCache

log = logging.getLogger("dynaquant")

_T = TypeVar("_T")

_MOST_LISTED = 10
"""Differences that a message lists."""

Models = nn.Module | Mapping[str, nn.Module]
"""A model, which may be wrapped, or several by name."""

Targets = dict[tuple[str, int], Tensor]
"""Tensors of a model to be filled, by stored name and address. Tied tensors are in it once."""


def stored_names(file: CheckpointFile) -> dict[str, str]:
    """Return the stored name of each tensor of the model's state dict.

    Logs a warning if tensors differ between the ranks that saved it, as only those of rank 0 are named. Raises
    CheckpointError unless the checkpoint holds exactly one state dict of a model.
    """
    try:
        found = state_dict_in(file.header.tree)
    except StateError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    warn_if_ranks_differ(file, found.values())
    known = file.header.by_name
    if missing := [name for name in found.values() if name not in known or known[name].omitted]:
        raise CheckpointError(
            f"{file.path}: the stored tree of the state names {missing[0]}, but there is no such tensor"
        )
    return found


def warn_if_ranks_differ(file: CheckpointFile, names: Iterable[str]) -> None:
    """Log a warning if tensors of a model differ between the ranks that saved it, as only those of rank 0 are read.

    Raises CheckpointError if the stored tree is malformed.
    """
    try:
        ranks = ranks_in(file.header.tree)
    except TypeError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    if differing := {name for each in ranks for name in each.tensors} & set(names):
        log.warning(
            "%s: %d tensors of the model, such as %s, differ between the ranks that saved it; only those of rank 0 are "
            "read here. load() has the others under 'ranks'",
            file.path,
            len(differing),
            min(differing),
        )


def weights_in_parts(file: CheckpointFile) -> dict[str, str]:
    """Return the class of each weight in whose place the model's state dict has its parts (``state/subclasses.py``)."""
    try:
        items, described = dict_items(model_in(file.header.tree)), descriptions_in(metadata_in(file.header.tree))
    except StateError:  # there is no model in it
        return {}
    keys = [str(key) for key, _ in items] + [f"{key}.{inner}" for key, node in items for inner, _ in dict_items(node)]
    wrappers = described.keys() - set(keys)
    return {owner: described[owner][CLASS] for key in keys if (owner := owner_of(key, wrappers)) is not None}


def _tensors_of(model: Models) -> tuple[dict[str, Any], dict[str, Mapping[str, str]]]:
    """Return the model's own tensors by their names in the bare model, or models; and ``descriptions_in`` its state."""
    if isinstance(model, nn.Module):
        state = state_dict(bare(model), keep_vars=True)
        return dict(state), descriptions_in(getattr(state, "_metadata", None))
    found = {key: _tensors_of(each) for key, each in model.items()}
    tensors, described = (
        {f"{key}.{name}": value for key, each in found.items() for name, value in each[i].items()} for i in (0, 1)
    )
    return tensors, described


def _named_as_in(own: Collection[str], stored: Mapping[str, _T]) -> Mapping[str, _T]:
    """Return what is stored of a wrapped model by the names in the bare one. own: these names."""
    named = {name if name in own or (b := unwrapped_name(name)) not in own else b: stored[name] for name in stored}
    return named if len(named) == len(stored) else stored


def targets_in(model: Models, file: CheckpointFile, strict: bool, hashes: HashCache) -> tuple[Targets, list[str]]:
    """Return the tensors of a model that a checkpoint can fill, and what does not fit.

    hashes: of tensors that the checkpoint does not store (role ``"omit"``), or that cannot be filled in place.

    Raises StateError, with a list of differences, if something does not fit; unless ``strict``, only if nothing fits.
    """
    own, described = _tensors_of(model)
    names, by_name = _named_as_in(own, stored_names(file)), file.header.by_name
    wrong = {name: what for name in own if name not in names and (what := _missing(file, name, own[name], hashes))}
    # A state has tied tensors that are omitted under the first of their names.
    found = {name for tied in tied_keys(own) if not wrong.keys() >= set(tied) for name in tied}
    wrong = {name: what for name, what in wrong.items() if name not in found}
    wrong |= {name: f"{name} is in the checkpoint, but not in the model" for name in names if name not in own}
    for name in own.keys() & names.keys():
        shape = by_name[names[name]].shape
        if not isinstance(own[name], Tensor):
            wrong[name] = f"{name} of the model is a {type(own[name]).__name__}, not a tensor"
        elif is_sharded(own[name]):
            wrong[name] = (
                f"{name} of the model is divided among ranks (a DTensor): restore it with a Checkpointer on all ranks, "
                "or load into a model that is not sharded"
            )
        elif own[name].is_nested:
            wrong[name] = f"{name} of the model is a nested tensor, which cannot be stored"
        elif own[name].is_meta:
            wrong[name] = f"{name} of the model is on the meta device; give it memory with model.to_empty(device=…)"
        elif own[name].shape != shape:
            wrong[name] = f"{name} is {list(shape)} in the checkpoint and {list(own[name].shape)} in the model"
        elif (owner := owner_of(name, described)) in own and hashes.of(name, own[name]) != by_name[names[name]].hash:
            wrong[name] = f"{name} belongs to {owner}, whose packed values differ; load the same base model first"
    earlier = _named_as_in(described, descriptions_in(metadata_in(file.header.tree))) if described else {}
    for owner in described.keys() & earlier.keys():
        if problem := description_problem(owner, described[owner], earlier[owner]):
            wrong |= dict.fromkeys((name for name in own if owner_of(name, described) == owner), problem)
    for first, *others in tied_keys({name: own[name] for name in own if name in names and name not in wrong}):
        different = [name for name in others if by_name[names[name]].hash != by_name[names[first]].hash]
        wrong |= {name: tied_problem(first, name) for name in different}
    problems = sorted(set(wrong.values()))
    fitting = {name: target for name, target in own.items() if name in names and name not in wrong}
    if problems and (strict or not fitting):
        problems = renaming_problem(model, own, names) + problems
        raise StateError(f"{file.path} does not fit the model:\n  {listed(problems)}\nNothing was changed.")
    return {(names[name], target.data_ptr()): target for name, target in fitting.items()}, problems


def listed(problems: list[str]) -> str:
    """Return the first problems, one a line, and how many more there are."""
    more = [f"… and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
    return "\n  ".join(problems[:_MOST_LISTED] + more)


def renaming_problem(model: Models, own: Collection[str], stored: Collection[str]) -> list[str]:
    """Return what to do if a model has other names than a checkpoint, and code that may rename those when it loads."""
    modules = [model] if isinstance(model, nn.Module) else model.values()
    if set(own) == set(stored) or not any(map(may_rename, modules)):
        return []
    return [
        "names differ, and load_state_dict() of the model has code that may rename them: if so, state = dq.load(…), "
        "model.load_state_dict(state['model']), optimizer.load_state_dict(state['optimizer'])"
    ]


def tied_problem(first: str, other: str) -> str:
    """Return the problem with two stored tensors of different values that are one tensor in the model."""
    return (
        f"{other} and {first} are one tensor in the model (tied), but the checkpoint has different values for them: "
        "load into a model that does not tie them"
    )


def expanded_error(name: str) -> StateError:
    """Return the error for a tensor that cannot take the stored values."""
    return StateError(
        f"{name} has elements that share memory (expand) and need different values: build it with clone()"
    )


def _missing(file: CheckpointFile, name: str, own: Any, hashes: HashCache) -> str | None:
    """Return the problem with a model's tensor whose values are not stored; None if its hash equals the stored one."""
    entry = file.header.by_name.get(f"model.{name}")
    if entry is None or not entry.omitted:
        return f"{name} is not in the checkpoint"
    if isinstance(own, Tensor) and not own.is_meta and hashes.of(name, own) == entry.hash:
        return None
    return f"{name} is not stored (role 'omit'), and its values in the model differ; load the same base model first"
