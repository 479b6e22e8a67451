"""Reads the JSON tree of a state without its tensors: the model in it, the tensors that it names, its depth.

``flatten.py`` makes the tree; docs/format.md, "Tree", specifies it. A tree from a file may be malformed, so these
functions skip nodes that they do not understand.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dynaquant.errors import StateError

MAX_DEPTH = 100
"""How many containers of a state may be nested (docs/format.md, "Tree")."""

PYTHON_CONTAINERS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
"""The key in the node of each container type of Python."""
SIZE = "size"
"""The key in the node of a ``torch.Size``."""
_CONTAINER_KEYS = frozenset({*PYTHON_CONTAINERS.values(), SIZE})

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "model_state")
"""Keys under which checkpoints of other programs keep the model's state dict."""


def with_items(container: Any, items: Iterable[Any]) -> Any:
    """Return a list, tuple, set or deque of the same kind with other items."""
    return deque(items, container.maxlen) if type(container) is deque else type(container)(items)


def state_dict_tree(names: Iterable[str]) -> Any:
    """Return the tree of a flat state dict whose tensors have these names."""
    return {"dict": [[name, {"tensor": name}] for name in names]}


def model_in(tree: Any) -> Any:
    """Return the node of the model's state dict.

    That is the dictionary under ``"model"``, ``"state_dict"`` or a similar key, otherwise the whole tree. Raises
    StateError if there is neither such a key nor a tensor at the top level.
    """
    items = dict_items(tree)
    model = next((node for key in _MODEL_KEYS for k, node in items if k == key and dict_items(node)), None)
    if model is None and all(tensor_name(node) is None for _, node in items):
        keys = ", ".join(str(key) for key, _ in items)
        raise StateError(f"there is no model in it; it has {keys or 'no entries'}")
    return tree if model is None else model


def state_dict_in(tree: Any) -> dict[str, str]:
    """Map the keys of the model's state dict to the names of their tensors.

    If there are several models, a key is ``<model>.<key>``. Raises StateError if the tree has no model, or if an entry
    of the state dict is not a tensor.
    """
    items = dict_items(model_in(tree))
    if all(dict_items(node) and all(tensor_name(inner) for _, inner in dict_items(node)) for _, node in items):
        items = [(f"{model}.{key}", inner) for model, node in items for key, inner in dict_items(node)]
    found = {str(key): tensor_name(node) for key, node in items}
    if others := [key for key, name in found.items() if name is None]:
        raise StateError(f"{others[0]} in the model is not a tensor; load the whole state, or export it to torch")
    return {key: name for key, name in found.items() if name is not None}


def metadata_in(tree: Any) -> dict[str, dict[str, Any]]:
    """Return the metadata of the model's state dict, by path in it. If there are several, a path is ``<model>.<path>``.

    Raises StateError if the tree has no model.
    """
    node = model_in(tree)
    nodes = [("", node), *((f"{key}.", inner) for key, inner in dict_items(node))]
    entries = [(f"{begin}{path}", entry) for begin, each in nodes for path, entry in dict_items(_metadata_of(each))]
    return {path: {key: value for key, value in dict_items(entry) if isinstance(key, str)} for path, entry in entries}


def _metadata_of(node: Any) -> Any:
    return node.get("metadata") if isinstance(node, dict) else None


def dict_items(node: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dictionary's node; an empty list for any other node."""
    if not isinstance(node, dict):
        return []
    content: Any = next((node[kind] for kind in ("dict", "ordered_dict") if kind in node), None)
    pairs = content if isinstance(content, list) else []
    return [(pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def node_at(tree: Any, path: str) -> Any:
    """Return the node at a path: keys of dictionaries and indices of lists and tuples, joined by ``/``.

    Of several keys that fit, the longest counts, as keys may contain ``/``. Raises KeyError, which says what there is
    instead, if the path leads nowhere.
    """
    items = dict_items(tree)
    content = None if items else tree.get("tuple") if isinstance(tree, dict) else tree
    inner = {str(key): node for key, node in (enumerate(content) if isinstance(content, list) else items)}
    found = max((key for key in inner if path == key or path.startswith(f"{key}/")), key=len, default=None)
    if found is None:
        raise KeyError(f"there are {_first(inner)}" if items and inner else _what_is_there(content, path))
    return inner[found] if path == found else node_at(inner[found], path[len(found) + 1 :])


def _first(keys: Collection[str]) -> str:
    return ", ".join(list(keys)[:10]) + (f" and {len(keys) - 10} more" if len(keys) > 10 else "")


def _what_is_there(content: Any, path: str) -> str:
    """Return what is where a path should lead, and is no dictionary with keys. content: of a list or tuple."""
    if not isinstance(content, list):
        return f"there is a single value where {path!r} should be; leave that out"
    if not content:
        return f"there is an empty list where {path!r} should be; leave that out"
    indices = f"an index from 0 to {len(content) - 1}" if len(content) > 1 else "the index 0, of its only item"
    return f"there is a list where {path!r} should be; give {indices}"


def tensor_name(node: Any) -> str | None:
    """Return the name in a tensor's node; None for any other node."""
    if not isinstance(node, dict):
        return None
    name = node.get("tensor", node.get("parameter"))
    return name if isinstance(name, str) else None


def tensor_names_in(node: Any) -> Iterator[str]:
    """Yield the names of all tensors and arrays below a node, in the order of the tree."""
    return (name for name, _ in _tensor_nodes(node))


def objects_in(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the outermost nodes of objects and of members of enumerations, at or below a node."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and not node.keys().isdisjoint(("object", "enum")):
            yield node
        elif isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def strides_in(node: Any) -> dict[str, Any]:
    """Return the strides of the tensors and arrays below a node that are not in C order, by name."""
    return {name: each["strides"] for name, each in _tensor_nodes(node) if "strides" in each}


def _tensor_nodes(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    waiting = [node]  # no recursion: a damaged file may have a tree of any depth
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(reversed(node))
        elif isinstance(node, dict):
            name = node.get("ndarray") if tensor_name(node) is None else tensor_name(node)
            if isinstance(name, str):
                yield name, node
            else:
                waiting.extend(reversed(node.values()))


def is_too_deep(tree: Any) -> bool:
    """Whether more than ``MAX_DEPTH`` containers are nested.

    ``flatten`` never makes such a tree. For one from a file, ``unflatten`` could raise RecursionError.
    """
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        containers = [inner for node in level if (inner := _children(node)) is not None]
        level = [node for inner in containers for node in inner]
    return bool(containers)


def _children(node: Any) -> list[Any] | None:
    """Return the nodes directly inside a container's node; None for any other node."""
    if isinstance(node, list):
        return node
    kinds = node.keys() & _CONTAINER_KEYS if isinstance(node, dict) else set()
    if not kinds:
        return None
    inner = [node["metadata"]] if "metadata" in node else []
    for kind in kinds:
        content = node[kind] if isinstance(node[kind], list) else []
        if kind in ("dict", "ordered_dict", "counter"):
            content = [part for pair in content if isinstance(pair, list) for part in pair]
        inner += content
    return inner


def without_tensors(tree: Any, names: Collection[str]) -> Any:
    """Return the tree without the dictionary entries whose values are tensors with these names."""
    if isinstance(tree, list):
        return [without_tensors(value, names) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kinds = tree.keys() & {"dict", "ordered_dict"}
    return {
        key: [[k, without_tensors(v, names)] for k, v in value if tensor_name(v) not in names]
        if key in kinds
        else without_tensors(value, names)
        for key, value in tree.items()
    }


def renamed(node: Any, names: Mapping[str, str]) -> Any:
    """Return a node with other names of tensors and arrays. names: the new names by the old ones."""
    if isinstance(node, list):
        return [renamed(value, names) for value in node]
    if not isinstance(node, dict):
        return node
    kinds = ("tensor", "parameter", "ndarray")
    return {k: names.get(v, v) if k in kinds and isinstance(v, str) else renamed(v, names) for k, v in node.items()}
