"""A mapping whose values are made when they are asked for, so that what does not fit into memory need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """Names and what makes the value of one of them. Nothing is kept: who asks twice has it made twice."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T]) -> None:
        self._names, self._make = names if isinstance(names, dict) else dict.fromkeys(names), make

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
