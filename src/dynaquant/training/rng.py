"""State of the global random number generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

ACCELERATORS = "accelerators"
"""The key of the generators of accelerators other than CUDA: a list for each type of device. Absent if there are
none."""


def get_state() -> dict[str, Any]:
    """Return the states of the global generators, including those of all accelerators of this machine.

    Python's 625 words become an array, since an array that does not change takes no space in the next checkpoint.
    """
    version, words, gauss = random.getstate()
    others = {
        kind: [module.get_rng_state(device) for device in range(count)] for kind, module, count in _accelerators()
    }
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": others.pop("cuda", []),
        **({ACCELERATORS: others} if others else {}),
    }


def device_states(state: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the states of the generators of accelerators in a state, by their type; ``cuda`` may have none."""
    return {"cuda": state["cuda"], **state.get(ACCELERATORS, {})}


def _accelerators() -> Iterator[tuple[str, Any, int]]:
    """Yield type, module and number of the accelerators of this machine whose generators this process can use."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    for kind in dict.fromkeys(["cuda", *([] if found is None else [found.type])]):
        module: Any = getattr(torch, kind, None)
        if all(hasattr(module, name) for name in ("device_count", "get_rng_state", "set_rng_state")):
            # In a process that was forked from one that uses the accelerator, PyTorch refuses to use it.
            count = 0 if getattr(module, "_is_in_bad_fork", lambda: False)() else module.device_count()
            if count:  # PyTorch may be built for an accelerator that is not here
                yield kind, module, count


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two states are equal."""
    return pickle.dumps(_plain(first)) == pickle.dumps(_plain(second))


def _plain(state: dict[str, Any]) -> Any:
    (version, words, gauss), (name, keys, *rest) = state["python"], state["numpy"]
    of_devices = {"cpu": [state["torch"]], **device_states(state)}
    tensors = {kind: [tensor.numpy().tobytes() for tensor in of_devices[kind]] for kind in sorted(of_devices)}
    return version, words.tobytes(), gauss, name, keys.tobytes(), rest, tensors


def check(state: dict[str, Any]) -> None:
    """Raise what ``set_state`` would raise for a malformed state. Changes no generator."""
    before = get_state()
    try:
        set_state(state)
    finally:
        set_state(before)


def set_state(state: dict[str, Any]) -> None:
    """Set the global generators to a state. Ignores states of devices that do not exist here."""
    version, words, gauss = state["python"]  # checkpoints of early versions hold the words as a tuple
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    stored = device_states(state)
    for kind, module, count in _accelerators():
        for device, device_state in enumerate(stored.get(kind, [])[:count]):
            module.set_rng_state(device_state, device)
