"""The state of the random number generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_state() -> dict[str, Any]:
    """The state of the global generators, of every CUDA device too where there are any.

    Python's 625 words are an array: what a checkpoint holds as such takes no room while it stays the same.
    """
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def check(state: dict[str, Any]) -> None:
    """Raises what ``set_state`` would raise for a broken state. The generators are as before."""
    before = get_state()
    try:
        set_state(state)
    finally:
        set_state(before)


def set_state(state: dict[str, Any]) -> None:
    """Puts the global generators back into a state. States of CUDA devices that are not there are left out."""
    version, words, gauss = state["python"]  # in older checkpoints the words are a tuple
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
