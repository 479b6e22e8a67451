"""The shards of a state's tensors on this rank, and numbers of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.reduction import Numbers, Reduce
from dynaquant.engine.tensors.shard import Shard


@dataclass(frozen=True)
class Shards:
    """Which part of each tensor this rank holds. By default it holds all of them as a whole, and nobody else does.

    held: by name; tensors that are not named are whole. others_count: names of tensors that another rank
    already counts. reduce: puts the numbers of all ranks together; None if there are no shards.
    """

    held: Mapping[str, Shard] = field(default_factory=dict)
    others_count: Collection[str] = frozenset()
    reduce: Reduce | None = None

    @property
    def divided(self) -> bool:
        """Whether ranks hold parts of one model, so that they must quantize together."""
        return self.reduce is not None

    def of(self, name: str, local: Tensor) -> Shard:
        """Return the shard of a tensor. local: what this rank holds of it."""
        return self.held.get(name) or Shard.whole(local.shape)

    def size(self, name: str, local: Tensor) -> int:
        """Return the number of elements of the whole tensor."""
        return self.of(name, local).shape.numel()

    def sums(self, numbers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Return for each tensor the sums of its numbers over all shards. Collective if there are any.

        All ranks give the same names in the same order, and as many numbers for each.
        """
        own = {name: [0.0] * len(each) if name in self.others_count else each for name, each in numbers.items()}
        return self._reduced(own, lambda reduce, flat: reduce(Numbers(sums=flat)).sums)

    def largest(self, numbers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Return for each tensor the largest of each of its numbers, which are not NaN. See ``sums``."""
        return self._reduced(numbers, lambda reduce, flat: reduce(Numbers(highest=flat)).highest)

    def any(self, flags: Mapping[str, bool]) -> dict[str, bool]:
        """Return for each tensor whether a flag is set on any rank. See ``sums``."""
        return {name: bool(found) for name, (found,) in self.largest({n: [float(f)] for n, f in flags.items()}).items()}

    def _reduced(
        self,
        numbers: Mapping[str, Sequence[float]],
        reduced: Callable[[Reduce, NDArray[np.float64]], NDArray[np.float64]],
    ) -> dict[str, list[float]]:
        if self.reduce is None or not numbers:
            return {name: list(each) for name, each in numbers.items()}
        flat = np.array([value for each in numbers.values() for value in each], dtype=np.float64)
        found = iter(reduced(self.reduce, flat).tolist())
        return {name: list(islice(found, len(each))) for name, each in numbers.items()}


WHOLE = Shards()
"""The shards of a process that holds every tensor as a whole."""
