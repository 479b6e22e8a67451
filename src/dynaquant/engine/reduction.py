"""Reductions: computations on one rank's part of a tensor that need numbers of the whole tensor.

Such a computation is a generator. It yields numbers of its part, receives those of the whole tensor, and goes on. The
same code serves one process, whose part is the whole, and the ranks of a sharded training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")
WINDOW = 1 << 26
"""Computations that run together hold at most so many numbers on a rank, unless one of them holds more."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of a part of a tensor, or of the whole tensor. sums: are added. highest: the largest counts."""

    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    highest: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


Reduction = Generator[Numbers, Numbers, T]
"""A computation that needs numbers of the whole tensor. All ranks yield the same kinds of numbers as often."""
Reduce = Callable[[Numbers], Numbers]
"""Returns the numbers of all ranks together. Collective."""


def total(*numbers: ArrayLike) -> Reduction[NDArray[np.float64]]:
    """Return the sums of numbers over all parts, flat."""
    flat = np.concatenate([np.ravel(np.asarray(each, dtype=np.float64)) for each in numbers])
    return (yield Numbers(sums=flat)).sums


def alone(reduction: Reduction[T]) -> T:
    """Return the result of a computation on a tensor that one process holds as a whole."""
    return run({"": reduction})[""]


def run(reductions: Mapping[str, Reduction[T]], reduce: Reduce | None = None) -> dict[str, T]:
    """Run computations together, so that one reduction serves all of them, and return their results by name.

    reduce: None if this process holds all tensors as a whole.
    """
    results: dict[str, T] = {}
    received: dict[str, Numbers | None] = dict.fromkeys(reductions)
    while received:
        yielded: dict[str, Numbers] = {}
        for name, numbers in received.items():
            try:
                yielded[name] = next(reductions[name]) if numbers is None else reductions[name].send(numbers)
            except StopIteration as end:
                results[name] = end.value
        received = dict(yielded if reduce is None else _reduced(yielded, reduce))
    return {name: results[name] for name in reductions}


def _reduced(yielded: Mapping[str, Numbers], reduce: Reduce) -> dict[str, Numbers]:
    """Return the numbers of all ranks. They travel together."""
    if not yielded:
        return {}
    found = reduce(
        Numbers(
            np.concatenate([numbers.sums for numbers in yielded.values()]),
            np.concatenate([numbers.highest for numbers in yielded.values()]),
        )
    )
    results, first_sum, first_highest = {}, 0, 0
    for name, own in yielded.items():
        sums, highest = first_sum + len(own.sums), first_highest + len(own.highest)
        results[name] = Numbers(found.sums[first_sum:sums], found.highest[first_highest:highest])
        first_sum, first_highest = sums, highest
    return results


def windows(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide tensors into groups whose computations run together. sizes: numbers that each holds in memory."""
    found: list[list[str]] = []
    elements = WINDOW
    for name, size in sizes.items():
        if elements + size > WINDOW:
            found.append([])
            elements = 0
        found[-1].append(name)
        elements += size
    return found


def run_in_windows(
    names: Iterable[str], start: Callable[[str], Reduction[T]], size: Callable[[str], int], reduce: Reduce | None
) -> dict[str, T]:
    """Run a computation for each tensor and return the results by name.

    start: begins the computation of a tensor. size: returns how many numbers it holds in memory on this rank. With
    ``reduce``, computations of a window run together: the more ranks hold a tensor, the more fit into one. All ranks
    give the same names, in the same order. Without, they run one after another, so that only one of them holds memory.
    """
    if reduce is None:
        return {name: alone(start(name)) for name in names}
    results: dict[str, T] = {}
    sizes = {name: size(name) for name in names}
    if sizes:  # ranks must come to the same windows
        largest = reduce(Numbers(highest=np.array(list(sizes.values()), dtype=np.float64))).highest
        sizes = {name: int(number) for name, number in zip(sizes, largest, strict=True)}
    for window in windows(sizes):
        results |= run({name: start(name) for name in window}, reduce)
    return results
