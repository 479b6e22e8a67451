"""``Board``: what each rank does at the moment, for the message of a rank that waits in vain."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist


class Board:
    """Tells the ranks what each of them does, through the store of the training's process group.

    If the store cannot be reached, nothing is known. number: of the group, the same on all ranks.
    """

    def __init__(self, number: int, rank: int, size: int) -> None:
        self._keys = [f"dynaquant/{number}/{each}" for each in range(size)]
        self._rank, self.own = rank, ""
        with suppress(AttributeError, RuntimeError, ValueError):  # PyTorch has no public function for this
            self._store: Any = dist.distributed_c10d._get_default_store()
        self.write("")

    def write(self, what: str, told: str | None = None) -> None:
        """Tell what this rank does. told: what the others read instead."""
        self.own = what
        with suppress(AttributeError, RuntimeError, ValueError):
            self._store.set(self._keys[self._rank], what if told is None else told)

    def read(self) -> dict[int, str]:
        """Return what the other ranks do, as far as they have told, by rank."""
        found = {}
        with suppress(AttributeError, RuntimeError, ValueError):
            for rank, key in enumerate(self._keys):
                if rank != self._rank and self._store.check([key]):
                    found[rank] = self._store.get(key).decode()
        return found
