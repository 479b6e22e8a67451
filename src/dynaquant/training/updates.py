"""Watches what optimizers do between two saves: which parameters they update, and whether gradients were not used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant.ranks.dtensors import holds_unreduced_gradients, local_of
from dynaquant.training.accumulated import Gradients
from dynaquant.training.hash_cache import version_of
from dynaquant.training.hooks import not_compiled, records_graph
from dynaquant.training.objects import first_names_in, optimizers_of


class Updates:
    """Watches the steps of the optimizers among the objects of a training, by hooks. A step costs next to nothing."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._by_name = optimizers_of(objects)
        self._optimizers = list(self._by_name.values())
        self._modules = [thing for thing in objects.values() if isinstance(thing, nn.Module)]
        self._stores_gradients = any(isinstance(thing, Gradients) for thing in objects.values())
        self._names = first_names_in(objects)
        self._updated: frozenset[str] = frozenset()
        self._updated_before: frozenset[str] = frozenset()
        self._waiting: dict[int, list[Tensor]] = {}  # parameters of each optimizer that it has not updated yet
        self._used: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}  # gradients in the last step, by parameter
        for optimizer in self._optimizers:  # what earlier steps have used cannot be told, so it is not noted
            self._use_gradients(optimizer)
        self._versions: dict[int, int | None] = {}  # of parameters at the last save; empty if there was none
        self._stepped: set[int] = set()  # optimizers that have made a step since
        self._begin()
        self._before_next_step: Callable[[], object] | None = None
        before_step, after_step = not_compiled(self._before_step), not_compiled(self._after_step)
        self._hooks = [optimizer.register_step_pre_hook(before_step) for optimizer in self._optimizers]
        self._hooks += [optimizer.register_step_post_hook(after_step) for optimizer in self._optimizers]

    def before_next_step(self, action: Callable[[], object]) -> None:
        """Call ``action`` once, just before an optimizer's next step. It may read tensors."""
        self._before_next_step = action

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ARG002
        if self._before_next_step is not None and not records_graph():
            action, self._before_next_step = self._before_next_step, None
            action()

    def _begin(self) -> None:
        self._waiting = {id(o): [p for group in o.param_groups for p in group["params"]] for o in self._optimizers}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if waiting := self._waiting.get(id(optimizer)):
            self._updated |= {self._names[id(p)] for p in waiting if p.grad is not None and id(p) in self._names}
            self._waiting[id(optimizer)] = [p for p in waiting if p.grad is None]
        self._use_gradients(optimizer)

    def _use_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, gradient in _first_gradients(optimizer):
            self._used[id(parameter)] = weakref.ref(gradient), version_of(gradient)

    @property
    def updated(self) -> frozenset[str]:
        """The names of the modules' parameters updated since the last save; if no step came, since the one before."""
        return self._updated or self._updated_before

    def saved(self) -> None:
        """Note that a checkpoint was saved."""
        self._updated_before, self._updated = self.updated, frozenset()
        self._begin()
        self._stepped.clear()
        parameters = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
        self._versions = {id(parameter): version_of(parameter) for parameter in parameters}

    def forget(self) -> None:
        """Note that a checkpoint was restored, which has written parameters."""
        self._versions.clear()

    def notes(self) -> list[str]:
        """Return a note if an optimizer is not in use any more, or if gradients are accumulated and are not stored.

        Gradients are accumulated if every optimizer has some that its last step has not used. Those of a single one of
        several may be left over from the backward pass for another one.
        """
        if replaced := [name for name, optimizer in self._by_name.items() if self._is_replaced(optimizer)]:
            return [
                f"weights have changed since the last save, but {', '.join(replaced)} has made no step; if another "
                "optimizer trains them now, this save has the old one's state: close this Checkpointer, and create one "
                "with the new optimizer"
            ]
        if self._stores_gradients or not self._optimizers:
            return []
        if not (any(map(holds_unreduced_gradients, self._modules)) or all(map(self._has_unused, self._optimizers))):
            return []
        return [
            "this save is in the middle of an accumulation: gradients that no step has used yet are not stored, so a "
            "restore loses them; save after a step, or give extras={'gradients': dq.Gradients(model)}"
        ]

    def _is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether something else than the known optimizers has updated its parameters since the last save."""
        if id(optimizer) in self._stepped:
            return False
        used = [o for o in self._optimizers if id(o) in self._stepped]
        by_others = {id(p) for o in used for group in o.param_groups for p in group["params"]}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in by_others]
        return any(self._versions.get(id(p), v) != v for p in parameters for v in (version_of(p),))

    def _has_unused(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self._is_unused(parameter, gradient) for parameter, gradient in _first_gradients(optimizer))

    def _is_unused(self, parameter: Tensor, gradient: Tensor) -> bool:
        used, version = self._used.get(id(parameter), (None, None))
        if used is not None and used() is gradient and version_of(gradient) == version:
            return False
        return gradient.layout != torch.strided or bool(local_of(gradient).any())

    def close(self) -> None:
        """Remove the hooks. May be called again."""
        while self._hooks:
            self._hooks.pop().remove()


def _first_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first parameter of each group that has a gradient, and that. A backward pass reaches most of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad
                break
