"""What a save leaves as it found it, whatever ``evaluate`` does to it and wherever a signal interrupts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynaquant.training import rng
from dynaquant.training.objects import generators, set_generators


class Snapshot:
    """A model's parameters and buffers (which tensors they are, not their values), its training modes, whether
    gradients are recorded, the global random number generators, and those among other objects of the training.
    """

    def __init__(self, model: nn.Module, sources: Mapping[str, Any] | None = None) -> None:
        self._sources = sources = sources or {}
        self._modules = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        self._recorded = torch.is_grad_enabled()
        self._generators, self._global = generators(sources), rng.get_state()

    def put_back(self) -> None:
        """Puts all of it back. May be called again, as it has to be where a signal has interrupted it."""
        for module, training, parameters, buffers in self._modules:
            module.training = training
            for own, before in ((module._parameters, parameters), (module._buffers, buffers)):
                if [(name, id(t)) for name, t in own.items()] != [(name, id(t)) for name, t in before.items()]:
                    own.clear()  # and with it what was registered since
                    own.update(before)  # type: ignore[arg-type]
        torch.set_grad_enabled(self._recorded)
        set_generators(self._sources, self._generators)
        rng.set_state(self._global)
