"""State of the global random number generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch


def get_state() -> dict[str, Any]:
    """Return the states of the global generators, including those of all CUDA devices.

    Python's 625 words become an array, since an array that does not change takes no space in the next checkpoint.
    """
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two states are equal."""
    return pickle.dumps(_plain(first)) == pickle.dumps(_plain(second))


def _plain(state: dict[str, Any]) -> Any:
    (version, words, gauss), (name, keys, *rest) = state["python"], state["numpy"]
    tensors = [state["torch"], *state["cuda"]]
    return version, words.tobytes(), gauss, name, keys.tobytes(), rest, [t.numpy().tobytes() for t in tensors]


def check(state: dict[str, Any]) -> None:
    """Raise what ``set_state`` would raise for a malformed state. Changes no generator."""
    before = get_state()
    try:
        set_state(state)
    finally:
        set_state(before)


def set_state(state: dict[str, Any]) -> None:
    """Set the global generators to a state. Ignores states of CUDA devices that do not exist here."""
    version, words, gauss = state["python"]  # checkpoints of early versions hold the words as a tuple
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
