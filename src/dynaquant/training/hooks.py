"""Hooks of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., object])


def not_compiled(hook: Hook) -> Hook:
    """Return a hook that ``torch.compile`` leaves alone: it would compile a step again for all that hooks remember."""
    found: Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return found


def records_graph() -> bool:
    """Whether a CUDA graph is being recorded: a hook may not read tensors then, and would run at no replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
