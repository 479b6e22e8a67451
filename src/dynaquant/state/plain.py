"""The part of a state that a checkpoint can store: without objects, classes and functions."""

from __future__ import annotations

from typing import Any

from dynaquant.errors import StateError
from dynaquant.state.flatten import CONTAINERS, flatten
from dynaquant.state.tree import with_items


def plain_part(state: Any) -> tuple[Any, list[str]]:
    """Return a state without what a checkpoint cannot store, and where that was, e.g. ``"hparams.loss (nn.MSELoss)"``.

    A dictionary loses the entry. A list, tuple or set that holds such a value is left out whole, as its other items
    would move. The state itself is not changed. Raises StateError if nothing of it can be stored.
    """
    left_out: list[str] = []
    found = _plain(state, "", left_out)
    if found is _NOTHING:
        raise StateError(f"a state of type {type(state).__qualname__} holds nothing that a checkpoint can store")
    return found, left_out


_NOTHING = object()


def _plain(value: Any, path: str, left_out: list[str]) -> Any:
    """Return the plain part of a value, ``_NOTHING`` if there is none."""
    if type(value) not in CONTAINERS:
        if _can_be_stored(value):
            return value
        left_out.append(f"{path} ({_name_of(value)})")
        return _NOTHING
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            if not _can_be_stored(key):
                left_out.append(f"{path} (a key: {_name_of(key)})")
            elif (plain := _plain(item, f"{path}.{key}" if path else str(key), left_out)) is not _NOTHING:
                kept[key] = plain
        found: Any = type(value)(kept)
        if hasattr(value, "_metadata"):  # of a module's state dict
            found._metadata = value._metadata
        return found
    inside: list[str] = []
    items = [_plain(item, f"{path}.{number}", inside) for number, item in enumerate(value)]
    left_out += inside
    return with_items(value, items) if not inside else _NOTHING


def _can_be_stored(value: Any) -> bool:
    try:
        flatten(value)
    except StateError:
        return False
    return True


def _name_of(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
