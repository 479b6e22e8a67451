"""Objects in an optimizer's state, such as GaLore's projectors: taken apart for a checkpoint, and put together again.

A file names the class of an object. Only classes of the packages that an optimizer's own classes come from are taken
apart or looked up, and only if Python makes and deletes their objects without code of the class. So a restore runs none
of that code. The optimizer's later steps do: they use the objects.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant.errors import StateError
from dynaquant.state.tree import with_items

_CONTAINERS = (dict, OrderedDict, list, tuple, deque)


@dataclass(frozen=True)
class PlainObject:
    """An object that was taken apart.

    kind: its class, as ``"module:name"``. content: its attributes by name, or the name of a member of an enumeration.
    """

    kind: str
    content: dict[str, Any] | str


def packages_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the packages that an optimizer's own classes come from; PyTorch is none of them."""
    kinds = [kind for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer)]
    return frozenset(kind.__module__.partition(".")[0] for kind in kinds) - {"torch"}


def taken_apart(value: Any, packages: Collection[str]) -> Any:
    """Return a state with a ``PlainObject`` for each object of these packages that is nothing but its attributes.

    Other values stay, so that ``flatten`` refuses what cannot be stored: also an object that is in the state twice,
    which would come back as two, and one that holds a parameter, which would come back as a copy.
    """
    return _taken_apart(value, packages, set()) if packages else value


def _taken_apart(value: Any, packages: Collection[str], seen: set[int]) -> Any:
    kind = type(value)
    if kind in _CONTAINERS:
        if id(value) in seen:
            return value
        seen.add(id(value))  # a container may be in a state twice, but not in itself
        found = converted(value, lambda item: _taken_apart(item, packages, seen))
        seen.remove(id(value))
        return found
    if kind.__module__.partition(".")[0] not in packages or _found(_name_of(kind), packages) is not kind:
        return value
    if isinstance(value, Enum):
        return PlainObject(_name_of(kind), value.name) if value.name in kind.__members__ else value
    attributes = getattr(value, "__dict__", None)
    if not _is_plain(kind) or id(value) in seen or not isinstance(attributes, dict):
        return value
    if any(isinstance(each, nn.Parameter) for each in leaves(attributes)):
        return value
    seen.add(id(value))
    return PlainObject(_name_of(kind), {key: _taken_apart(item, packages, seen) for key, item in attributes.items()})


def put_together(value: Any, packages: Collection[str], device: torch.device | None) -> Any:
    """Return a state with the objects that were taken apart.

    device: of the tensors in them, wherever they were at the save, which a file does not say. None: they stay.

    Raises StateError if a class is not one of these packages, has not been imported, or is not nothing but attributes.
    """
    if isinstance(value, PlainObject):
        kind, content = _found(value.kind, packages), value.content
        if kind is None or issubclass(kind, Enum) != isinstance(content, str):
            raise StateError(
                f"it has an object of the class {value.kind}, which cannot be found; import that module before the "
                "restore, in the version that it was saved with"
            )
        if isinstance(content, str):
            if content not in kind.__members__:  # type: ignore[attr-defined]
                raise StateError(f"it has {value.kind}.{content}, which that class does not have")
            return kind[content]  # type: ignore[index]
        if not _is_plain(kind):
            raise StateError(
                f"it has an object of the class {value.kind}, which is more than its attributes (it may have a method "
                "such as __setstate__ or __del__); use the version of the package that it was saved with"
            )
        found: Any = object.__new__(kind)
        vars(found).update({key: _moved(put_together(v, packages, device), device) for key, v in content.items()})
        return found
    return converted(value, lambda item: put_together(item, packages, device))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what the containers in a value hold at any depth, also keys. Looks into each container once."""
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping | list | tuple | set | frozenset | deque):
            yield each
        elif id(each) not in seen:
            seen[id(each)] = each
            waiting.extend([*each.keys(), *each.values()] if isinstance(each, Mapping) else each)


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value if device is None else value.to(device)
    return converted(value, lambda item: _moved(item, device))


def converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a container with converted items; the same object if none changes, or if it is no container."""
    if type(value) not in _CONTAINERS:
        return value
    items = list(value.values() if isinstance(value, dict) else value)
    found = [convert(item) for item in items]
    if all(new is old for new, old in zip(found, items, strict=True)):
        return value
    return type(value)(zip(value, found, strict=True)) if isinstance(value, dict) else with_items(value, found)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(name: str, packages: Collection[str]) -> type | None:
    """Return the imported class of a name, if it belongs to one of the packages."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.partition(".")[0] in packages else None
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and _name_of(found) == name else None


def _is_plain(kind: type) -> bool:
    """Whether an object of a class is nothing but its attributes: no code of the class makes, stores or deletes it."""
    if issubclass(kind, Tensor | nn.Module | torch.optim.Optimizer):
        return False
    makers = ("__new__", "__getattribute__", "__reduce_ex__", "__reduce__", "__getstate__")
    as_object = all(getattr(kind, name) is getattr(object, name) for name in makers)
    has_slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    return as_object and not has_slots and not hasattr(kind, "__setstate__") and not hasattr(kind, "__del__")


def has_method(thing: Any, name: str) -> bool:
    """Whether an object has a method of this name.

    What is no attribute may be answered by code of the object, such as a dictionary's with ``__getattr__``, which may
    raise any error, or return None.
    """
    try:
        return callable(getattr(thing, name, None))
    except Exception:
        return False
