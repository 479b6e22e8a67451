"""Converts a state to a JSON tree and named tensors, and back.

No pickle is involved: a value that JSON and tensors cannot express is an error. In the JSON tree (docs/format.md,
"Tree"), ``None``, bools, ints, finite floats, strings and lists stand for themselves. Every other value is an object
whose key is its type, e.g. ``{"tuple": [1, 2]}`` or ``{"tensor": "model.head.weight"}``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynaquant.engine.tensors.dtypes import DTYPES, dtype_name
from dynaquant.engine.tensors.strides import strides_of, with_strides
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, memory_of, part_problem
from dynaquant.state.plain_objects import PlainObject, has_method
from dynaquant.state.tree import MAX_DEPTH, PYTHON_CONTAINERS, SIZE

CONTAINERS: dict[type, str] = {**PYTHON_CONTAINERS, torch.Size: SIZE}
"""The key in the node of each container type."""
ALONE = "tensor"
"""The name of a tensor that is the whole state."""
_NUMPY_KINDS = "biufc"
_STORABLE = frozenset(DTYPES.values())
_MAX_INT_BITS = 14_000  # Python refuses to parse integers of more than 4,300 digits


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON tree of a state, and its tensors by name.

    A name is the path of the tensor's first occurrence, joined by dots. Tied tensors (same memory, same shape) appear
    once. The tensors are detached and share the state's memory; DTensors stay such. NumPy arrays become tensors in the
    machine's byte order.

    Raises StateError, naming the path, for a value that cannot be stored.
    """
    flattener = _Flattener()
    return flattener.node(state, ""), flattener.tensors


def flatten_whole(state: Any, advice: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return ``flatten`` of a state that one process holds as a whole, with all tensors on the CPU.

    advice: added to the error about a value that cannot be stored.

    Raises StateError, naming the path, for such a value, and for a tensor of which this process holds only a part.
    """
    flattener = _Flattener()
    try:
        tree = flattener.node(state, "")
    except StateError as error:
        raise StateError(f"{error}{advice}") from error
    if flattener.parts:
        path, problem = next(iter(flattener.parts.items()))
        raise StateError(
            f"{path or 'the state'}: {problem}; save it with dynaquant.interop.dcp, a DTensor also with a "
            "dynaquant.Checkpointer or as full_tensor()"
        )
    return tree, {name: tensor.cpu() for name, tensor in flattener.tensors.items()}


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: dict[str, str] = {}  # why a tensor is not whole, by path: the detached ones do not tell
        self._names: dict[tuple[Any, ...], str] = {}  # by memory, shape and dtype
        self._inside: set[int] = set()  # ids of the containers on the current path

    def node(self, value: Any, path: str) -> Any:
        """Return the JSON node of a value. Refuses subclasses: a restore would return their base class."""
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _MAX_INT_BITS):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is Tensor or kind is torch.nn.Parameter or is_sharded(value):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind in CONTAINERS:
            return self._container(value, path)
        if kind is PlainObject:
            return self._object(value, path)
        return _node_of_plain_value(value, path)

    def _name(self, tensor: Tensor, path: str) -> str:
        memory = (memory_of(tensor), tensor.stride(), tensor.dtype, tensor.device)
        if memory in self._names and tensor.numel() > 0:
            return self._names[memory]
        path = path or ALONE
        name, number = path, 2
        while name in self.tensors:
            name, number = f"{path}~{number}", number + 1
        self._names[memory], self.tensors[name] = name, tensor
        return name

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        problem = _tensor_problem(tensor)
        if problem:
            raise StateError(f"{path or 'the state'}: {problem}")
        if (part := part_problem(tensor)) is not None:
            self.parts[path] = part
        kind = "tensor" if type(tensor) is Tensor or not isinstance(tensor, torch.nn.Parameter) else "parameter"
        plain, trains = tensor.detach(), tensor.requires_grad
        if (plain.is_neg() or plain.is_conj()) and not is_sharded(tensor):
            plain = plain.resolve_conj().resolve_neg()
        node = self._node_of(kind, plain, path)
        if trains != (kind == "parameter"):
            node["requires_grad"] = trains
        return node

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        if array.dtype.kind not in _NUMPY_KINDS or not hasattr(torch, array.dtype.name):
            raise StateError(f"{path}: a NumPy array of {array.dtype} has no tensor type to store it as")
        native = np.array(array, dtype=array.dtype.newbyteorder("="))
        return self._node_of("ndarray", torch.from_numpy(native), path)

    def _node_of(self, kind: str, tensor: Tensor, path: str) -> dict[str, Any]:
        node: dict[str, Any] = {kind: self._name(tensor, path)}
        if not tensor.is_contiguous() and not is_sharded(tensor) and (strides := strides_of(tensor)) is not None:
            node["strides"] = list(strides)
        return node

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._inside:
            raise StateError(f"{path}: the state contains itself here")
        if len(self._inside) >= MAX_DEPTH:
            raise StateError(f"{path}: the state is nested too deeply to store (more than {MAX_DEPTH} levels)")
        self._inside.add(id(value))
        kind = CONTAINERS[type(value)]
        if isinstance(value, dict):
            pairs = [[self._key(k, path), self.node(v, _join(path, k))] for k, v in value.items()]
            node: Any = {kind: pairs}
            # The state dict of a module carries version numbers in this attribute.
            metadata = getattr(value, "_metadata", None)
            if metadata is not None:
                node["metadata"] = self.node(metadata, f"{path}._metadata")
        else:
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            content = [self.node(v, _join(path, i)) for i, v in enumerate(items)]
            node = content if kind == "list" else {kind: content}
            if isinstance(value, deque):
                node["maxlen"] = value.maxlen
        self._inside.remove(id(value))
        return node

    def _key(self, key: Any, path: str) -> Any:
        if type(key) is str:  # nearly always
            return key
        if isinstance(key, Tensor):  # only the tensor itself finds the entry, and a restore makes another one
            raise StateError(
                f"{path}: a dictionary with tensors as keys cannot be restored; use names or numbers as keys"
            )
        return self.node(key, f"{path} (a key)")

    def _object(self, value: PlainObject, path: str) -> Any:
        if isinstance(value.content, str):
            return {"enum": [value.kind, value.content]}
        return {"object": value.kind, **self._container(value.content, path)}


def _node_of_plain_value(value: Any, path: str) -> Any:
    kind, path = type(value), path or "the state"
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
    if has_method(value, "state_dict"):
        raise StateError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be stored inside another object; save its "
            "state_dict(), or make it an extra of its own"
        )
    raise StateError(
        f"{path}: a value of type {kind.__module__}.{kind.__qualname__} cannot be stored; "
        "make it a tensor, a plain value, or an object with state_dict() and load_state_dict()"
    )


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _nested_problem(tensor: Tensor) -> str | None:
    # Class and layout of a strided nested tensor are those of a plain tensor, but it has no shape.
    if not tensor.is_nested:
        return None
    return "a nested tensor cannot be stored; store the tensors that it is made of, or pad it to a dense one"


def _tensor_problem(tensor: Tensor) -> str | None:
    if tensor.dtype in _STORABLE and tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta):
        return None
    if (problem := _nested_problem(tensor)) is not None:
        return problem
    if tensor.layout != torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor cannot be stored; make it dense first"
    if tensor.device.type == "meta":
        return "a tensor on the meta device has no values to store"
    return f"a tensor of {dtype_name(tensor.dtype)} cannot be stored"


def unflatten(
    tree: Any, tensors: dict[str, Tensor], device: torch.device | None = None, stored_strides: bool = True
) -> Any:
    """Build a state from its JSON tree and its tensors. The inverse of ``flatten``.

    device: of the state's tensors, by default that of the given ones. Arrays stay where they are. stored_strides:
    whether tensors get the strides that the tree says; otherwise they are taken as they are.

    Raises StateError if the tree is malformed or names a tensor that is missing.
    """
    built: dict[tuple[str, str, bool], Tensor] = {}
    placed: dict[str, Tensor] = {}

    def in_place(name: str, node: dict[str, Any], device: torch.device | None) -> Tensor:
        if name not in placed:
            values = tensors[name] if device is None else tensors[name].to(device)
            placed[name] = with_strides(values, node["strides"]) if "strides" in node and stored_strides else values
        return placed[name]

    def tensor(kind: str, node: dict[str, Any], requires_grad: bool) -> Tensor:
        name = node[kind]
        key = (kind, name, requires_grad)  # tied tensors must become one object again
        if key not in built:
            values = in_place(name, node, device)
            if kind == "parameter":
                built[key] = torch.nn.Parameter(values, requires_grad=requires_grad)
            else:
                built[key] = values.detach().requires_grad_(requires_grad)
        return built[key]

    def pairs(content: Any) -> list[tuple[Any, Any]]:
        return [(value(k), value(v)) for k, v in content]

    def values(content: Any) -> list[Any]:
        return [value(v) for v in content]

    builders: dict[str, Callable[[Any], Any]] = {
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
        "enum": lambda content: PlainObject(*content),
    }

    def value(node: Any) -> Any:
        if isinstance(node, list):
            return values(node)
        if not isinstance(node, dict):
            return node
        kind = next(iter(node))
        if kind in ("tensor", "parameter"):
            return tensor(kind, node, node.get("requires_grad", kind == "parameter"))
        if kind == "ndarray":
            return in_place(node[kind], node, None).numpy()
        if kind == "object":
            return PlainObject(node[kind], dict(pairs(node["dict"])))
        if kind == "deque":
            return deque(values(node[kind]), node["maxlen"])
        result = builders[kind](node[kind])
        if "metadata" in node:
            result._metadata = value(node["metadata"])
        return result

    try:
        return value(tree)
    except (LookupError, ValueError, TypeError, AttributeError, StopIteration, OverflowError, RuntimeError) as error:
        raise StateError(f"the stored tree of the state is broken: {error!r}") from error
