"""Remembers what loading states may change in the objects of a training, to put it back if a restore fails."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, local_of, memory_of
from dynaquant.state.flatten import flatten, unflatten
from dynaquant.state.plain_objects import has_method
from dynaquant.state.subclasses import PACKED, inner_tensors, is_wrapper
from dynaquant.training import rng
from dynaquant.training.collect import state_of
from dynaquant.training.expanded import copy_into
from dynaquant.training.load_state import load_state, refill
from dynaquant.training.objects import CHECKED, GENERATOR

log = logging.getLogger("dynaquant")

_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""Methods of a module that load a state. A module with its own may change anything."""
_MUTABLE = (Tensor, nn.Module, torch.optim.Optimizer, dict, list, set, tuple, deque)
"""What may change, or contain what may change."""


class Undo:
    """The state of objects before a restore. ``put_back`` runs no code of modules and optimizers.

    Tensors are copied to host memory; containers keep their identity. Extras with a ``load_state_dict`` are put back by
    it. The global random number generators are put back last.

    without: tensors that are not put back, as ``memory_of`` identifies what this rank holds of them.
    """

    def __init__(self, things: Iterable[Any], without: Collection[Any] = ()) -> None:
        self._without = frozenset(without)
        self._put_back: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # by id; this keeps the objects alive, so that no other gets their ids
        self._global = rng.get_state()
        for thing in things:
            if isinstance(thing, CHECKED | dict | list):
                self._remember(thing)
            else:
                self._remember_extra(thing)

    def put_back(self) -> None:
        """Put everything back. What fails is logged as a warning, and does not keep the rest from being put back."""
        with torch.no_grad():
            for put_back in self._put_back:
                try:
                    put_back()
                except Exception as error:
                    log.warning(
                        "the restore failed, and an object could not be set back to its state from before: %r", error
                    )
        rng.set_state(self._global)

    def _remember_extra(self, thing: Any) -> None:
        if not isinstance(thing, GENERATOR):
            self._remember_attributes(thing, deep=not has_method(thing, "load_state_dict"))
        try:
            tree, tensors = flatten(state_of(thing))
        except StateError:  # the present state cannot be saved, but the stored one may still be restored
            log.debug("a %s cannot be put back as a whole if the restore fails", type(thing).__qualname__)
            return
        state = unflatten(tree, {name: tensor.clone() for name, tensor in tensors.items()})
        self._put_back.append(lambda: load_state(thing, state))

    def _remember(self, value: Any) -> None:
        """Remember the content of a value, if it can have any that loading a state changes."""
        if not isinstance(value, _MUTABLE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._remember_tensor(value)
        elif isinstance(value, nn.Module):
            deep = any(map(_loads_itself, value.modules()))
            for module in value.modules():
                self._seen[id(module)] = module
                self._remember_attributes(module, deep)
        elif isinstance(value, torch.optim.Optimizer):
            self._remember_attributes(value, deep=True)
        elif isinstance(value, dict):
            self._remember_dictionary(value)
            for content in dict.values(value):
                self._remember(content)
        else:
            before = list(value)
            if not isinstance(value, tuple):
                self._put_back.append(lambda: refill(value, before))
            for content in before:
                self._remember(content)

    def _remember_attributes(self, thing: Any, deep: bool) -> None:
        """Remember the attributes of an object. deep: also what they contain; otherwise a module's tensors only."""
        attributes = getattr(thing, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        self._remember_dictionary(attributes)
        own = [attributes["_parameters"], attributes["_buffers"]] if isinstance(thing, nn.Module) else []
        for content in attributes.values() if deep else own:
            self._remember(content)

    def _remember_beside(self, thing: Any) -> None:
        """Remember the attributes of a tensor of a class of its own, and what a packed one keeps beside its values."""
        self._remember_attributes(thing, deep=True)
        for name in PACKED:
            if hasattr(state := vars(thing).get(name), "__dict__"):
                self._remember_beside(state)

    def _remember_dictionary(self, value: dict[Any, Any]) -> None:
        before = dict(value)

        def put_back() -> None:
            if list(value) != list(before):
                dict.clear(value)
            for key, content in before.items():
                dict.__setitem__(value, key, content)

        self._put_back.append(put_back)

    def _remember_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested:
            return
        if is_wrapper(tensor):
            for part in inner_tensors(tensor).values():
                self._remember(part)
            return
        if type(tensor) not in (Tensor, nn.Parameter) and not is_sharded(tensor):
            self._remember_beside(tensor)
        if self._without and memory_of(local_of(tensor)) in self._without:
            return
        memory, required = local_of(tensor), tensor.requires_grad
        values = memory.to("cpu", copy=True)

        def put_back() -> None:
            with torch.inference_mode(memory.is_inference()):
                copy_into(memory, values)
            if not is_sharded(tensor) and (tensor.data_ptr(), tensor.shape) != (memory.data_ptr(), memory.shape):
                tensor.data = memory
            if tensor.is_leaf:
                tensor.requires_grad_(required)

        self._put_back.append(put_back)


def loads_as_pytorch_does(thing: nn.Module | torch.optim.Optimizer) -> bool:
    """Whether nothing but PyTorch's own code takes part when a module or an optimizer loads a state."""
    if isinstance(thing, nn.Module):
        return not any(map(_loads_itself, thing.modules()))
    # An optimizer that wraps another one may never have called the constructor of Optimizer.
    hooks = [getattr(thing, f"_optimizer_load_state_dict_{when}_hooks", {}).values() for when in ("pre", "post")]
    methods = (type(thing).load_state_dict, type(thing).__setstate__)
    return all(map(_is_pytorchs, [*methods, *hooks[0], *hooks[1]]))


def _is_pytorchs(function: Any) -> bool:
    function = getattr(function, "hook", function)  # modules wrap their hooks
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _loads_itself(module: nn.Module) -> bool:
    """Whether code that is not PyTorch's takes part when the module loads a state."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    if not all(map(_is_pytorchs, hooks)):
        return True
    kinds = [kind for kind in type(module).__mro__ if not f"{kind.__module__}.".startswith("torch.nn.")]
    return any(name in vars(kind) for kind in kinds for name in _LOADING)
