"""Remembers the state that ``evaluate`` may change, so that a save can put it back, even if a signal interrupts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynaquant.ranks.dtensors import reshard
from dynaquant.training import rng
from dynaquant.training.load_state import refill
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
        self._attributes = [_Attributes(module) for module in model.modules() if not _is_pytorch_s(module)]
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
        for attributes in self._attributes:
            attributes.put_back()
        torch.set_grad_enabled(self._recorded)
        set_generator_states(self._objects, self._generators)
        rng.set_state(self._global)


class _Attributes:
    """The attributes of a module that are not ``nn.Module``'s own, with the content of lists, dictionaries and sets."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        self._content = [(value, value.copy()) for value in self._values.values() if type(value) in (list, dict, set)]

    def put_back(self) -> None:
        own = vars(self._module)
        for name in own.keys() - self._values.keys() - _OF_EVERY_MODULE:
            del own[name]
        own.update(self._values)
        for value, content in self._content:
            refill(value, content)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def has_own_train(module: nn.Module) -> bool:
    """Whether a layer does something of its own when it is put into another mode, such as merging weights."""
    own = type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval
    return own and not _is_pytorch_s(module)


def _is_pytorch_s(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
