"""What differs between the ranks of a training, in the tree of its state (docs/format.md, "Several ranks").

The tree is that of rank 0. Under one more key it has, for each rank, what that rank holds otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaquant.errors import StateError
from dynaquant.state.tree import MAX_DEPTH, dict_items, is_too_deep, renamed, tensor_name

RANKS = "ranks"
"""The key, which no object may have as its name. Names of tensors that are stored for a rank begin with it."""
_TENSORS, _OBJECTS = "tensors", "objects"


@dataclass(frozen=True)
class OfRank:
    """What a rank holds otherwise than rank 0.

    tensors: the names of tensors of its state, each with the name under which this rank's values are stored. objects:
    by their key in the state, the nodes of those whose tree is another one; with stored names.
    """

    tensors: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)


def stored_name(rank: int, name: str) -> str:
    """Return the name under which the values of a rank are stored, of a tensor that differs between ranks."""
    return f"{RANKS}.{rank}.{name}"


def is_of_a_rank(name: str) -> bool:
    """Whether a stored tensor holds the values of one rank."""
    return name.startswith(f"{RANKS}.")


def with_ranks(tree: Any, ranks: Sequence[OfRank]) -> Any:
    """Return the tree of a state with what its ranks hold otherwise, in the order of the ranks."""
    nodes = [
        _dict({_TENSORS: _dict({n: {"tensor": s} for n, s in each.tensors.items()}), _OBJECTS: _dict(each.objects)})
        if each.tensors or each.objects
        else _dict({})
        for each in ranks
    ]
    result = {"dict": [*tree["dict"], [RANKS, nodes]]}
    if is_too_deep(result):
        raise StateError(f"an extra that differs between ranks is nested too deeply (more than {MAX_DEPTH - 4} levels)")
    return result


def ranks_in(tree: Any) -> list[OfRank]:
    """Return what each rank holds otherwise; nothing if nothing differs. Raises TypeError for a malformed tree."""
    nodes: Any = next((node for key, node in dict_items(tree) if key == RANKS), [])
    found = []
    for node in nodes if isinstance(nodes, list) else []:
        content = dict(dict_items(node))
        tensors = {name: tensor_name(inner) for name, inner in dict_items(content.get(_TENSORS))}
        if not all(isinstance(text, str) for pair in tensors.items() for text in pair):
            raise TypeError("what its ranks hold is not named")
        found.append(OfRank(tensors, dict(dict_items(content.get(_OBJECTS)))))  # type: ignore[arg-type]
    return found


def tree_of(tree: Any, rank: OfRank) -> Any:
    """Return the tree of a rank's state. It names tensors as that rank does."""
    if not any(key == RANKS for key, _ in dict_items(tree)):
        return tree
    own = {stored: name for name, stored in rank.tensors.items()}
    nodes = {key: renamed(node, own) for key, node in rank.objects.items()}
    return _dict({**{key: node for key, node in dict_items(tree) if key != RANKS}, **nodes})


def _dict(content: Mapping[str, Any]) -> Any:
    return {"dict": [[key, node] for key, node in content.items()]}
