"""State of the global random number generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import pickle
import random
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
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        **({ACCELERATORS: others} if (others := _of_accelerators()) else {}),
    }


def _accelerator() -> tuple[str, Any, int] | None:
    """Return type, module and number of this machine's accelerators; None if they are CUDA's or have no generators."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    module: Any = None if found is None or found.type == "cuda" else getattr(torch, found.type, None)
    if found is None or not all(hasattr(module, name) for name in ("device_count", "get_rng_state", "set_rng_state")):
        return None
    count = module.device_count()  # 0 if PyTorch was built for an accelerator that is not here
    return (found.type, module, count) if count else None


def _of_accelerators() -> dict[str, list[Tensor]]:
    if (found := _accelerator()) is None:
        return {}
    kind, module, count = found
    return {kind: [module.get_rng_state(device) for device in range(count)]}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two states are equal."""
    return pickle.dumps(_plain(first)) == pickle.dumps(_plain(second))


def _plain(state: dict[str, Any]) -> Any:
    (version, words, gauss), (name, keys, *rest) = state["python"], state["numpy"]
    of_devices = {"cpu": [state["torch"]], "cuda": state["cuda"], **state.get(ACCELERATORS, {})}
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
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    if (found := _accelerator()) is not None:
        kind, module, count = found
        for device, device_state in enumerate(state.get(ACCELERATORS, {}).get(kind, [])[:count]):
            module.set_rng_state(device_state, device)
