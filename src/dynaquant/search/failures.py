"""Decides what a failure of ``evaluate`` means: the weights are not good enough, or the save must end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dynaquant.errors import EvaluateError

T = TypeVar("T")


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns the result of an action that evaluates, or its error. Raises errors that end a save as they are."""
    try:
        return action(), None
    except EvaluateError:  # of ``quality.score``: ``evaluate`` has changed a frozen parameter
        raise
    except Exception as error:
        if ended_by(error):
            error.add_note("raised while dynaquant called evaluate; nothing was saved, and training is as before")
            raise
        return None, error


def ended_by(error: Exception) -> bool:
    """Whether an error ends a save because it is not about the weights: memory ran out, or the device failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | getattr(torch, "AcceleratorError", MemoryError)):
        return True
    # PyTorch has no class for a lack of host memory, and before 2.8 none for errors of the device.
    told_apart = ("DefaultCPUAllocator: ", "CUDA error: ", "HIP error: ")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in told_apart)


def said(error: Exception | None) -> str | None:
    """Returns an error in one line."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_on_every_rank(errors: Sequence[str | None], own: Exception | None) -> None:
    """Raises EvaluateError, naming the ranks that failed, if any did. errors: by rank. own: this rank's, the cause."""
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise EvaluateError("evaluate failed, so nothing was saved; " + "; ".join(failed)) from own
