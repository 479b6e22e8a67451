"""Sorts exceptions in ``evaluate``: either the weights are not good enough, or the save must end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dynaquant.errors import EvaluateError
from dynaquant.ranks.group import SAME_IN_EVALUATE, has_timed_out

T = TypeVar("T")

_NOTE = "raised while dynaquant called evaluate; nothing was saved, and training is unchanged"


def attempt(
    action: Callable[[], T], failed: Callable[[Exception], object] = lambda _: None
) -> tuple[T | None, Exception | None]:
    """Run an action that evaluates. Returns its result and None, or None and its exception.

    failed: called with the exception. Exceptions that end a save are raised.
    """
    try:
        return action(), None
    except EvaluateError:  # from ``Subject.score``: ``evaluate`` has changed a frozen parameter
        raise
    except Exception as error:
        if ends_save(error):
            if _NOTE not in getattr(error, "__notes__", ()):
                error.add_note(_NOTE)
            raise
        failed(error)
        return None, error


def ends_save(error: Exception) -> bool:
    """Return whether an exception ends the save, because memory or the device caused it and not the weights."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | getattr(torch, "AcceleratorError", MemoryError)):
        return True
    # PyTorch has no class for a lack of host memory, and before 2.8 none for device errors.
    prefixes = ("DefaultCPUAllocator: ", "CUDA error: ", "HIP error: ")
    return isinstance(error, RuntimeError) and any(prefix in str(error) for prefix in prefixes)


def one_line(error: Exception | None) -> str | None:
    """Return the type and message of an exception."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_on_every_rank(errors: Sequence[str | None], own: Exception | None) -> None:
    """Raise EvaluateError that names the failed ranks, if there are any.

    errors: one for each rank, None where it did not fail. own: this rank's, which becomes the cause.
    """
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        waited = len(errors) > 1 and any(map(has_timed_out, failed))
        advice = f". {SAME_IN_EVALUATE}" if waited else ""
        raise EvaluateError("evaluate failed, so nothing was saved; " + "; ".join(failed) + advice) from own
