"""Captures the state of a training: a JSON tree, and the live tensors by name with their roles.

Finds the tensors whose values a checkpoint does not hold: omitted ones, and those in a file of frozen parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.bound import Bound
from dynaquant.engine.forms.external import External, omitted
from dynaquant.engine.label import Label
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, local_of, reshard
from dynaquant.ranks.group import Group
from dynaquant.saving.differences import Differences, find_differences
from dynaquant.saving.division import Division, divide
from dynaquant.saving.rank_zero import rng_states_of_other_ranks
from dynaquant.state.flatten import flatten
from dynaquant.state.of_ranks import with_ranks
from dynaquant.state.roles import compared_across_steps, labels, untrained
from dynaquant.state.subclasses import owner_of
from dynaquant.state.tree import without_tensors
from dynaquant.store.commit import WritableRun
from dynaquant.store.writing import Base
from dynaquant.training.collect import collect
from dynaquant.training.hash_cache import HashCache
from dynaquant.training.moment_uses import exact_optimizers
from dynaquant.training.objects import PARAMETERS, models_of
from dynaquant.training.supported import notes_on_inner_optimizers, notes_on_other_names


@dataclass(frozen=True)
class Captured:
    """The state of a training at a save, and the hashes and external tensors of the last checkpoint.

    tree: of the state, without omitted tensors. tensors: the training's own, by name; what this rank holds of those
    that are divided. small_on_host: the same, but small ones of devices are copies in host memory. parameters: names of
    every optimizer's parameters, by group (``parameter_names``). last_hashes: hashes of the tensors of the last
    checkpoint. last_external: its tensors that were omitted, or that lie in a usable file of frozen parameters. Both
    are empty if there is no last checkpoint, or if the state is divided. division: of the tensors among the ranks; None
    if every rank holds all of them. exact_optimizers: names of those whose moments are stored exactly, each with the
    reason. untrained: names of the parameters that do not train. compared: of those that ``compared_across_steps``
    returns. differences: what differs between ranks. notes: for the record, each of which is also a warning.
    """

    tree: Any
    tensors: Mapping[str, Tensor]
    small_on_host: Mapping[str, Tensor]
    labels: Mapping[str, Label]
    parameters: Mapping[str, Sequence[Sequence[str]]]
    last_hashes: Mapping[str, str]
    last_external: Mapping[str, External]
    division: Division | None = None
    exact_optimizers: Mapping[str, str] = field(default_factory=dict)
    untrained: frozenset[str] = frozenset()
    compared: frozenset[str] = frozenset()
    differences: Differences = field(default_factory=Differences)
    notes: Sequence[str] = ()

    @property
    def shards(self) -> Shards:
        """The shards that the tensors are."""
        return WHOLE if self.division is None else self.division.shards


def capture(
    objects: Mapping[str, Any],
    roles: Mapping[str, str | Bound],
    vectors: bool,
    run: WritableRun,
    base: Base | None,
    rank_0_only: Collection[str],
    differed: Collection[str] | None,
    group: Group,
    updated: frozenset[str],
) -> Captured:
    """Capture the state of the objects. Collective.

    roles: overrides by glob pattern. vectors: whether parameters of one dimension are weights. base: the last
    checkpoint. rank_0_only: names of tensors of which rank 0's values count, although ranks may hold others. differed:
    names of tensors that differed between ranks at the last save; None: compare all. updated: names of parameters that
    an optimizer has updated lately.

    Raises StateError for a state that cannot be stored.
    """
    other_ranks = rng_states_of_other_ranks(objects, group)
    reshard(models_of(objects))

    def collected() -> tuple[Any, dict[str, Tensor], dict[str, list[list[str]]]]:
        state = collect(objects, other_ranks)
        return *flatten(state), state[PARAMETERS]

    tree, tensors, parameters = group.run_on_all_ranks(collected)
    division = divide(tensors, group)
    # A mesh may have one process. Plain tensors are detached already.
    here = {name: local_of(tensor) if is_sharded(tensor) else tensor for name, tensor in tensors.items()}
    local = here if division is None else division.local  # a rank may hold more than rank 0 does
    # Ranks must come to the same roles; the steps that find them out are made on all, as they may communicate.
    exact = group.from_rank_0(exact_optimizers(objects))
    updated = group.from_rank_0(updated)
    idle = group.run_on_all_ranks(lambda: untrained(objects, updated))
    compared = group.run_on_all_ranks(lambda: compared_across_steps(objects))
    label_of = group.run_on_all_ranks(lambda: labels(local, objects, roles, vectors, exact, idle, compared))
    omit = {name for name, label in label_of.items() if label.role == "omit"}
    if omit and division is not None:
        raise StateError(
            f"{min(omit)} has role 'omit', which sharded training does not support yet; without the role, what does "
            "not change takes no space in the next checkpoints"
        )
    tree = without_tensors(tree, omit) if omit else tree
    left_out = {*omit, *rank_0_only, *(division.shards.held if division is not None else ())}
    differences = find_differences(tree, here, left_out, objects, differed, group)
    notes = [
        *differences.note(label_of),
        *notes_on_inner_optimizers(objects),
        *notes_on_other_names(parameters, here, objects),
    ]
    label_of = differences.exact(label_of)
    if differences.ranks:
        tree = with_ranks(tree, differences.ranks)
    small_on_host = group.run_on_all_ranks(lambda: kernels.small_on_host(local))
    last = base if division is None else None
    return Captured(
        tree,
        local,
        small_on_host,
        label_of,
        parameters,
        last_hashes={} if last is None else last.hashes,
        last_external={} if last is None else run.frozen_files.available(last.tensors),
        division=division,
        exact_optimizers=exact,
        untrained=idle,
        compared=compared,
        differences=differences,
        notes=notes,
    )


@dataclass(frozen=True)
class FrozenParameters:
    """Names of the parameters that do not train and are stored exactly.

    unchanged: those that have not changed since the last checkpoint, or that are not in it.
    """

    names: frozenset[str]
    unchanged: frozenset[str]


def frozen_parameters(captured: Captured, hashes: HashCache) -> FrozenParameters:
    """Return the frozen parameters of a state, with all that belongs to them.

    A parameter that changes although it does not train, such as an average of weights, may change again. So it is not
    among the unchanged.
    """
    exact = (name for name in captured.tensors if captured.labels[name].role == "exact")
    idle = captured.untrained
    names = {name for name in exact if name in idle or owner_of(name, idle)} if idle else set()
    last = captured.last_hashes
    changed = {name for name in names if name in last and hashes.of(name, captured.tensors[name]) != last[name]}
    return FrozenParameters(frozenset(names), frozenset(names - changed))


def in_frozen_files(captured: Captured, frozen: FrozenParameters) -> dict[str, External]:
    """Return the unchanged frozen parameters that are in a file of the run already, by name."""
    last = captured.last_external
    return {name: last[name] for name in frozen.unchanged if name in last and last[name].file is not None}


def omitted_tensors(captured: Captured, hashes: HashCache) -> dict[str, External]:
    """Return the tensors of role ``omit`` by name, with their hashes.

    Raises StateError if one has changed since the last checkpoint, as its new values would be lost.
    """
    found: dict[str, External] = {}
    for name in (name for name, label in captured.labels.items() if label.role == "omit"):
        tensor, last = captured.tensors[name], captured.last_external.get(name)
        digest = hashes.of(name, tensor)
        if last is not None and last.file is None and last.hash != digest:
            raise StateError(
                f"{name} is not stored (role 'omit'), and has changed since the last checkpoint: its new values would "
                f"be lost, so nothing was saved; to store it, add {name!r}: 'exact' as the last role"
            )
        found[name] = omitted(name, tensor.dtype, tensor.shape, digest)
    return found
