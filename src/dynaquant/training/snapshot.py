"""Remembers the state that ``evaluate`` may change, so that a save can put it back, even if a signal interrupts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynaquant.ranks.dtensors import reshard
from dynaquant.training import rng
from dynaquant.training.objects import generator_states, set_generator_states


class Snapshot:
    """Remembers what a user's ``evaluate`` may change.

    These are the model's parameters and buffers (which tensors they are, not their values), its training modes, whether
    gradients are recorded, the global random number generators, and the generators among the other objects; also what
    layers with a ``train`` of their own note in plain attributes. Parameters that FSDP2 has gathered count as changed:
    they are freed.
    """

    def __init__(self, model: nn.Module, objects: Mapping[str, Any] | None = None) -> None:
        reshard(model)
        self._model = model
        self._objects = objects = objects or {}
        self._modules = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        self._noted = [(vars(module), _plain(module)) for module in model.modules() if has_own_train(module)]
        self._recorded = torch.is_grad_enabled()
        self._generators, self._global = generator_states(objects), rng.get_state()

    def put_back_surely(self) -> None:
        """Put everything back, also if a signal interrupts it."""
        try:
            self.put_back()
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Put everything back. Call it again if a signal has interrupted it."""
        reshard(self._model)
        for module, training, parameters, buffers in self._modules:
            module.training = training
            for own, before in ((module._parameters, parameters), (module._buffers, buffers)):
                if [(name, id(t)) for name, t in own.items()] != [(name, id(t)) for name, t in before.items()]:
                    own.clear()  # also removes what was registered since
                    own.update(before)  # type: ignore[arg-type]
        for attributes, noted in self._noted:
            attributes.update(noted)
        torch.set_grad_enabled(self._recorded)
        set_generator_states(self._objects, self._generators)
        rng.set_state(self._global)


def has_own_train(module: nn.Module) -> bool:
    """Whether a layer does something of its own when it is put into another mode, such as merging weights."""
    own = type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval
    return own and not type(module).__module__.startswith("torch.")


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in vars(module).items() if isinstance(each, bool | int | float | str | None)}
