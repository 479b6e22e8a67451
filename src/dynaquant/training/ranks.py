"""The ranks of a data-parallel training, as far as a checkpoint needs them to agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from dynaquant.errors import DynaquantError

T = TypeVar("T")


class Group:
    """All processes of the training, over the CPU; a single process is a group of one.

    Made on every rank at once. Its methods but ``watched`` are collective: every rank calls them in the same order.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._communicated = False
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # Its own group: the default one may be NCCL's, which moves only CUDA tensors.
            self._group = dist.new_group(backend="gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def watched(self, function: Callable[[nn.Module], float]) -> Callable[[nn.Module], float]:
        """Wraps the function to record whether it communicates between ranks; ``communicates`` returns that."""
        if self._group is None:
            return function

        def watch(model: nn.Module) -> float:
            before = _operations()
            try:
                return function(model)
            finally:
                self._communicated |= before is None or _operations() != before

        return watch

    def communicates(self) -> bool:
        """Whether a watched function has, or may have, communicated on any rank. Collective."""
        self._communicated = any(self.gather(self._communicated))
        return self._communicated

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """The action's result, once it has ended well on every rank.

        Raises the action's own exception where it failed, and DynaquantError on the other ranks.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise DynaquantError("; ".join(failed))
        return result  # type: ignore[return-value]


def _operations() -> dict[str, list[int]] | None:
    """Returns how many operations the backends of each group of several ranks have begun, by the group's name.

    None if a backend does not count, as with MPI. Backends count operations of Python, C++ and compiled code, from any
    thread. NCCL does not count ``send`` and ``recv``. PyTorch has no public function for this.
    """
    try:
        return {
            name: [_begun(group._get_backend(device)) for device in group._device_types]
            for group, name in dist.distributed_c10d._world.pg_names.items()
            if group.size() > 1
        }
    except (AttributeError, RuntimeError):
        return None


def _begun(backend: Any) -> int:
    return int(backend._get_sequence_number_for_group())
