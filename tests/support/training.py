"""Small trainings and bit-exact comparison, for the tests that need a whole state."""

from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


def model_of(width: int = 24) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(40, width),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Dropout(0.1),
        nn.Linear(width, 40),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Train on random tokens, drawn from the global generator."""
    model.train()
    for _ in range(steps):
        tokens = torch.randint(0, 40, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
        optimizer.step()


def named_state(optimizer: torch.optim.Optimizer, **modules: nn.Module) -> dict:
    """Return an optimizer's state with parameter names instead of numbers, as in a checkpoint."""
    name_of = {id(p): f"{module}.{name}" for module, of in modules.items() for name, p in of.named_parameters()}
    names = [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()
    return {
        "state": {names[key] if isinstance(key, int) else key: of for key, of in state["state"].items()},
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in state["param_groups"]],
    }


def bits(value):
    """Return a state as plain values that are equal if and only if the states are: tensors as type, shape and bytes."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return ("tensor", str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return (type(value).__name__, [(key, bits(v)) for key, v in value.items()])
    if isinstance(value, list | tuple | set | deque):
        return (type(value).__name__, getattr(value, "maxlen", None), [bits(v) for v in value])
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return (type(value).__name__, bits(vars(value)))
    return (type(value).__name__, repr(value))
