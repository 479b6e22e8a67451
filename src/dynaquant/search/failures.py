"""What it means when ``evaluate`` fails: that weights are not good enough, or that the save must end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dynaquant.errors import EvaluateError

T = TypeVar("T")


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What an action that evaluates returns, or what it raised. Errors that end a save are raised as they are."""
    try:
        return action(), None
    except EvaluateError:  # by ``quality.score``: it says more than that the weights are not good enough
        raise
    except Exception as error:
        if ended_by(error):
            error.add_note("dynaquant met this while it called evaluate; nothing was saved, and training is as before")
            raise
        return None, error


def ended_by(error: Exception) -> bool:
    """Whether an error ends a save, as it says nothing of the weights: memory ran out, or the device failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | getattr(torch, "AcceleratorError", MemoryError)):
        return True
    # PyTorch has no classes of their own for these: the host's memory, and the device's errors before 2.8.
    told_apart = ("DefaultCPUAllocator: ", "CUDA error: ", "HIP error: ")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in told_apart)


def said(error: Exception | None) -> str | None:
    """An error in one line."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_on_every_rank(errors: Sequence[str | None], own: Exception | None) -> None:
    """Raises EvaluateError naming the ranks that failed, if any did. errors: by rank. own: this rank's, its cause."""
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise EvaluateError("evaluate failed, so nothing was saved; " + "; ".join(failed)) from own
