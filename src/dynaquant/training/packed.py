"""Packs small states of many ranks into one tensor of bytes, since entries of their own would fill a header."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynaquant.engine.tensors.dtypes import DTYPES, dtype_name
from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten, unflatten

_LENGTH = 8
"""Bytes of the lengths, which are little-endian."""


def packed(state: Any) -> bytes:
    """Return a state as bytes: the length of a text, the text in JSON, and the values of its tensors.

    The text is a list of the tree of the state (docs/format.md, "Tree") and of name, dtype and shape of each tensor.
    """
    tree, tensors = flatten(state)
    heads = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    text = json.dumps([tree, heads], allow_nan=False, separators=(",", ":")).encode()
    values = [tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *values])


def joined(states: Sequence[bytes]) -> Tensor:
    """Return packed states as one tensor of bytes, the length of each before it."""
    pieces = [piece for state in states for piece in (len(state).to_bytes(_LENGTH, "little"), state)]
    return torch.from_numpy(np.frombuffer(b"".join(pieces), dtype=np.uint8).copy())


def count(joined: Tensor) -> int:
    """Return how many states ``joined`` has packed. Raises ValueError if it is damaged."""
    rest, found = memoryview(joined.numpy().tobytes()), 0
    while rest:
        found, rest = found + 1, _cut(rest)[1]
    return found


def unpacked(joined: Tensor, number: int) -> Any:
    """Return one of the states that ``joined`` has packed; None if there are fewer. Raises ValueError if damaged."""
    rest = memoryview(joined.numpy().tobytes())
    for _ in range(number + 1):
        if not rest:
            return None
        state, rest = _cut(rest)
    text, values = _cut(state)
    tree, heads = json.loads(bytes(text))
    tensors = {}
    for name, dtype, shape in heads:
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        tensors[name] = torch.frombuffer(bytearray(values[:size]), dtype=DTYPES[dtype]).reshape(shape)
        values = values[size:]
    try:
        return unflatten(tree, tensors)
    except StateError as error:
        raise ValueError(str(error)) from error


def _cut(data: memoryview) -> tuple[memoryview, memoryview]:
    """Return what a length says, and what follows."""
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if len(data) < max(end, _LENGTH):
        raise ValueError("states of ranks end too early")
    return data[_LENGTH:end], data[end:]
