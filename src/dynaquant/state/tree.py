"""State tree <-> named tensors + a JSON tree. No pickle: what JSON and tensors cannot express is an error.

The JSON tree (docs/format.md, "Tree") writes ``None``, bools, ints, finite floats, strings and lists as themselves.
Everything else is an object with one key, the type, e.g. ``{"tuple": [1, 2]}`` or ``{"tensor": "model.head.weight"}``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynaquant.errors import StateError
from dynaquant.tensors.dtypes import DTYPES, dtype_name

_NUMPY_KINDS = "biufc"
MAX_DEPTH = 100
"""Containers of a state within one another, at most (docs/format.md, "Tree")."""
_MAX_INT_BITS = 14_000  # Python refuses to read integers of more than 4,300 digits


_CONTAINERS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Takes a state apart into a JSON tree and its tensors by name.

    A name is the path of the tensor's first occurrence, joined by dots. Tensors that are the same memory with the
    same shape (tied) appear once. The tensors are the state's own, detached, not copies. NumPy arrays become tensors,
    in the machine's byte order.

    Raises StateError, naming the path, for a value that cannot be expressed.
    """
    flattener = _Flattener()
    return flattener.node(state, ""), flattener.tensors


def tree_of(names: Iterable[str]) -> Any:
    """The tree of a flat state dict whose tensors have these names, without the tensors being there."""
    return {"dict": [[name, {"tensor": name}] for name in names]}


_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "model_state")
"""Where checkpoints of other programs keep their model's state dict."""


def model_in(tree: Any) -> Any:
    """The node of a model's state dict in a tree: what is under ``"model"``, ``"state_dict"`` and the like, else the
    state itself, if there are tensors in it. Raises StateError when there is none."""
    pairs = pairs_of(tree)
    within = next((node for key in _MODEL_KEYS for k, node in pairs if k == key and pairs_of(node)), None)
    if within is None and all(tensor_name(node) is None for _, node in pairs):
        parts = ", ".join(str(key) for key, _ in pairs)
        raise StateError(f"there is no model in it; it has {parts or 'no parts'}")
    return tree if within is None else within


def state_dict_in(tree: Any) -> dict[str, str]:
    """Keys of a model's state dict in a tree, and the names of their tensors; of several models, ``<model>.<key>``.

    Raises StateError when there is none, or something in it is no tensor.
    """
    pairs = pairs_of(model_in(tree))
    if all(pairs_of(node) and all(tensor_name(of) for _, of in pairs_of(node)) for _, node in pairs):
        pairs = [(f"{model}.{key}", of) for model, node in pairs for key, of in pairs_of(node)]
    found = {str(key): tensor_name(node) for key, node in pairs}
    if others := [key for key, name in found.items() if name is None]:
        raise StateError(f"{others[0]} of the model is no tensor; export it to torch, or load all")
    return {key: name for key, name in found.items() if name is not None}


def pairs_of(node: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dictionary's node; none for other nodes."""
    if not isinstance(node, dict):
        return []
    content: Any = next((node[kind] for kind in ("dict", "ordered_dict") if kind in node), None)
    pairs = content if isinstance(content, list) else []
    return [(pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def tensor_name(node: Any) -> str | None:
    """The name of a tensor's node; None for other nodes."""
    if not isinstance(node, dict):
        return None
    name = node.get("tensor", node.get("parameter"))
    return name if isinstance(name, str) else None


def names_in(node: Any) -> Iterator[str]:
    """The names of the tensors and arrays anywhere below a node, in its order."""
    waiting = [node]  # no recursion: what a file has in the place of a tree may be of any depth
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(reversed(node))
        elif isinstance(node, dict):
            name = node.get("ndarray") if tensor_name(node) is None else tensor_name(node)
            if isinstance(name, str):
                yield name
            else:
                waiting.extend(reversed(node.values()))


def is_too_deep(tree: Any) -> bool:
    """Whether a tree has more than ``MAX_DEPTH`` containers within one another: ``flatten`` makes no such tree, and to
    put one together could end in a RecursionError."""
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        containers = [inner for node in level if (inner := _within(node)) is not None]
        level = [node for inner in containers for node in inner]
    return bool(containers)


def _within(node: Any) -> list[Any] | None:
    """The nodes in that of a container; None for other nodes. Malformed ones are left to ``unflatten``."""
    if isinstance(node, list):
        return node
    kinds = node.keys() & set(_CONTAINERS.values()) if isinstance(node, dict) else set()
    if not kinds:
        return None
    inner = [node["metadata"]] if "metadata" in node else []
    for kind in kinds:
        content = node[kind] if isinstance(node[kind], list) else []
        if kind in ("dict", "ordered_dict", "counter"):
            content = [part for pair in content if isinstance(pair, list) for part in pair]
        inner += content
    return inner


def without(tree: Any, names: Collection[str]) -> Any:
    """A tree without the entries of its dictionaries that are the tensors of these names."""
    if isinstance(tree, list):
        return [without(value, names) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kinds = tree.keys() & {"dict", "ordered_dict"}
    return {
        key: [[k, without(v, names)] for k, v in value if tensor_name(v) not in names]
        if key in kinds
        else without(value, names)
        for key, value in tree.items()
    }


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # by place in memory
        self._inside: set[int] = set()  # the containers that the current path leads through

    def node(self, value: Any, path: str) -> Any:
        """The JSON node of a value. Exact types only: a subclass would come back as its base class."""
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _MAX_INT_BITS):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in (Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind in _CONTAINERS:
            return self._container(value, path)
        return _plain(value, path)

    def _name(self, tensor: Tensor, path: str) -> str:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() > 0 and place in self._names:
            return self._names[place]
        name, number = path, 2
        while name in self.tensors:
            name, number = f"{path}~{number}", number + 1
        self._names[place], self.tensors[name] = name, tensor
        return name

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        problem = _tensor_problem(tensor)
        if problem:
            raise StateError(f"{path}: {problem}")
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        node: dict[str, Any] = {kind: self._name(tensor.detach().resolve_conj().resolve_neg(), path)}
        if tensor.requires_grad != (kind == "parameter"):
            node["requires_grad"] = tensor.requires_grad
        return node

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        if array.dtype.kind not in _NUMPY_KINDS or not hasattr(torch, array.dtype.name):
            raise StateError(f"{path}: a NumPy array of {array.dtype} has no tensor type to store it as")
        native = np.array(array, dtype=array.dtype.newbyteorder("="))
        return {"ndarray": self._name(torch.from_numpy(native), path)}

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._inside:
            raise StateError(f"{path}: the state contains itself here")
        if len(self._inside) >= MAX_DEPTH:
            raise StateError(f"{path}: the state is nested too deeply to store (more than {MAX_DEPTH} levels)")
        self._inside.add(id(value))
        kind = _CONTAINERS[type(value)]
        if isinstance(value, dict):
            pairs = [[self.node(k, f"{path} (a key)"), self.node(v, _join(path, k))] for k, v in value.items()]
            node: Any = {kind: pairs}
            # Modules keep the versions of their state dicts in an attribute of it.
            metadata = getattr(value, "_metadata", None)
            if metadata is not None:
                node["metadata"] = self.node(metadata, f"{path}._metadata")
        else:
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            content = [self.node(v, _join(path, i)) for i, v in enumerate(items)]
            node = content if kind == "list" else {kind: content}
        self._inside.remove(id(value))
        return node


def _plain(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is int:
        raise StateError(f"{path}: an integer of {value.bit_length()} bits is too large to store")
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {"scalar": [value.dtype.name, base64.b64encode(value.tobytes()).decode()]}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    if isinstance(value, Tensor):
        problem = _nested_problem(value) or (
            f"a tensor of class {kind.__module__}.{kind.__qualname__} cannot be stored; wrap its owner, as an "
            "extra, in an object whose state_dict() gives plain tensors and whose load_state_dict() takes them"
        )
        raise StateError(f"{path}: {problem}")
    raise StateError(
        f"{path}: a value of type {kind.__module__}.{kind.__qualname__} cannot be stored; "
        "make it a tensor, a plain value, or an object with state_dict() and load_state_dict()"
    )


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _nested_problem(tensor: Tensor) -> str | None:
    """Those of the strided layout are plain tensors by their class and their layout, and have no shape."""
    if not tensor.is_nested:
        return None
    return "a nested tensor cannot be stored; store the tensors that it is made of, or pad it to a dense one"


def _tensor_problem(tensor: Tensor) -> str | None:
    if (problem := _nested_problem(tensor)) is not None:
        return problem
    if tensor.layout != torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor cannot be stored; make it dense first"
    if tensor.device.type == "meta":
        return "a tensor on the meta device has no values to store"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"a tensor of {dtype_name(tensor.dtype)} cannot be stored"
    return None


def unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Puts a state together again from its JSON tree and its tensors. The inverse of ``flatten``.

    Raises StateError when the tree is not one that ``flatten`` makes, or names a tensor that is not there.
    """
    built: dict[tuple[str, str, bool], Tensor] = {}

    def tensor(kind: str, name: str, requires_grad: bool) -> Tensor:
        # Tied tensors must come back as one object.
        place = (kind, name, requires_grad)
        if place not in built:
            if kind == "parameter":
                built[place] = torch.nn.Parameter(tensors[name], requires_grad=requires_grad)
            else:
                built[place] = tensors[name].detach().requires_grad_(requires_grad)
        return built[place]

    def pairs(content: Any) -> list[tuple[Any, Any]]:
        return [(value(k), value(v)) for k, v in content]

    def values(content: Any) -> list[Any]:
        return [value(v) for v in content]

    builders: dict[str, Callable[[Any], Any]] = {
        "ndarray": lambda name: tensors[name].numpy(),
        "scalar": lambda content: np.frombuffer(base64.b64decode(content[1]), dtype=np.dtype(content[0]))[0],
        "float": float,
        "complex": lambda content: complex(*map(float, content)),
        "bytes": base64.b64decode,
        "dtype": lambda name: DTYPES[name],
        "device": torch.device,
        "dict": lambda content: dict(pairs(content)),
        "ordered_dict": lambda content: OrderedDict(pairs(content)),
        "counter": lambda content: Counter(dict(pairs(content))),
        "tuple": lambda content: tuple(values(content)),
        "set": lambda content: set(values(content)),
        "frozenset": lambda content: frozenset(values(content)),
        "size": lambda content: torch.Size(values(content)),
    }

    def value(node: Any) -> Any:
        if isinstance(node, list):
            return values(node)
        if not isinstance(node, dict):
            return node
        kind = next(iter(node))
        if kind in ("tensor", "parameter"):
            return tensor(kind, node[kind], node.get("requires_grad", kind == "parameter"))
        result = builders[kind](node[kind])
        if "metadata" in node:
            result._metadata = value(node["metadata"])
        return result

    try:
        return value(tree)
    except (
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        StopIteration,
        OverflowError,
        RuntimeError,
    ) as error:
        raise StateError(f"the stored tree of the state is broken: {error!r}") from error
