"""Other values for the parameters of a sharded model, written in place and put back.

FSDP2 keeps references to its parameters, so they cannot be replaced by others, as those of other models are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dynaquant.ranks.dtensors import is_sharded, local_of


class InPlace:
    """Remembers the values and gradients of sharded parameters, so that ``evaluate`` may change them.

    parameters: those that train; plain ones are left alone. The remembered values take as much memory as this rank's
    part of them, on the same device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._own = [parameter for parameter in parameters if is_sharded(parameter)]
        self._locals = [_memory(parameter) for parameter in self._own]
        self._before = [local.clone() for local in self._locals]
        self._gradients = [parameter.grad for parameter in self._own]

    def write(self, values: Mapping[int, Any]) -> None:
        """Write other values, of this rank's part. values: tensors, or functions that return them, by ``id``."""
        for parameter in self._own:
            parameter.grad = None
        for parameter, local in zip(self._own, self._locals, strict=True):
            if (value := values.get(id(parameter))) is not None:
                local.copy_(value if isinstance(value, Tensor) else value())

    def put_back(self) -> None:
        """Put values and gradients back, bit for bit. Gathered parameters must be freed before. May be called again."""
        for parameter, local, before, gradient in zip(
            self._own, self._locals, self._before, self._gradients, strict=True
        ):
            local.copy_(before)
            parameter.grad = gradient


def _memory(parameter: Tensor) -> Tensor:
    # Through ``.data``, writes are not counted. A backward pass would refuse parameters that were written to since the
    # forward pass, but these will have their values again.
    return local_of(parameter).data
