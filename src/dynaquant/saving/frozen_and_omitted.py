"""Finds the tensors whose values a checkpoint does not hold: omitted ones, and those in a file of frozen parameters."""

from __future__ import annotations

from dataclasses import dataclass

from dynaquant.engine.forms.external import External, omitted
from dynaquant.errors import StateError
from dynaquant.saving.capture import Captured
from dynaquant.state.subclasses import owner_of
from dynaquant.training.hash_cache import HashCache


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
