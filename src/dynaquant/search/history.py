"""What earlier searches found: the configurations that the next one starts from, by how much was allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dynaquant.quantize.partition import Configuration

_SMALLEST = 1e-9
"""Limits below it are taken for it, so that they have a logarithm."""


class History:
    """The last best configuration for every limit, as powers of two.

    Limits change from one checkpoint to the next: the user changes ε, and a noisy metric leaves less of it. What was
    found for a limit is no place to start from for another one.
    """

    def __init__(self) -> None:
        self._found: dict[int, Configuration] = {}

    def nearest(self, limit: float) -> Configuration | None:
        """What was found last for the limit, or for the nearest one; None when none was ever as loose as this one."""
        key = _key(limit)
        if not self._found or key > max(self._found):
            return None
        return self._found[min(self._found, key=lambda known: (abs(known - key), -known))]

    def note(self, limit: float, configuration: Configuration) -> None:
        """Takes note of what was found for a limit."""
        self._found[_key(limit)] = configuration

    def to_json(self) -> dict[str, Any]:
        """The history as it stands in a record."""
        return {str(key): asdict(configuration) for key, configuration in self._found.items()}

    @classmethod
    def from_json(cls, data: Any) -> History:
        """The inverse of ``to_json``; an empty history for anything else."""
        history = cls()
        try:
            if isinstance(data, Mapping):
                history._found = {int(key): Configuration(**knobs) for key, knobs in data.items()}
        except (TypeError, ValueError):
            return cls()
        return history


def _key(limit: float) -> int:
    return round(math.log2(max(limit, _SMALLEST)))
