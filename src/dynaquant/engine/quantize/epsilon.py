"""What an optimizer adds to the root of a second moment, and what is as good as zero beside it (method 2.3).

Weights that get no gradients any more, such as those of dead units and of rare tokens, have second moments that decay
until float32 holds no smaller number. Their updates are ``m / ε`` all the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dynaquant.cached import cached_property

_LARGEST = 1e-6
"""A larger ε may be something else than what is added to the root."""


@dataclass(frozen=True)
class Epsilon:
    """The ε of the updates ``m / (sqrt(v) + ε)`` of a parameter. value: 0 if it is not known."""

    value: float = 0.0

    @property
    def assumed(self) -> float:
        """ε, or the usual one."""
        return self.value or 1e-8

    @cached_property
    def negligible(self) -> float:
        """Second moments up to this change the divisor of an update by at most 3 %."""
        return (min(self.value, _LARGEST) / 32) ** 2

    @cached_property
    def zero(self) -> float:
        """First moments up to this make no update where the second moment is zero: at most a millionth of a step."""
        return min(self.value, _LARGEST) / 2**20


epsilon_with = lru_cache(maxsize=64)(Epsilon)
"""Returns an ``Epsilon``; the thousands of tensors of a checkpoint share a few."""
