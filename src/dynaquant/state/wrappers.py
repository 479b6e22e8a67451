"""Unwraps models and optimizers (DDP, ``torch.compile``, …), so that names are those of the bare model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from dynaquant.state.subclasses import plain_state

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which ``torch.compile`` and PyTorch's activation checkpointing keep the wrapped module."""
_OF_FABRIC = ("_forward_module", "_original_module")
"""Attributes in which Fabric keeps what it calls, which may be wrapped once more, and the module that it was given."""
_SHARE_STATE = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})
"""Packages whose wrappers of an optimizer are optimizers, too, with the groups and the state of the one inside."""


def bare(thing: Any) -> Any:
    """Return the module or optimizer inside all wrappers; any other object unchanged.

    Wrappers of modules are DistributedDataParallel, DataParallel, ``torch.compile``, activation checkpointing and
    Fabric's. A wrapper of an optimizer has the attribute ``optimizer`` and shares its groups and state, as those of
    Accelerate and Lightning do. An optimizer that changes the steps of another one, such as Lookahead, is no wrapper.
    """
    while (inner := _inside(thing)) is not None:
        thing = inner
    return thing


def named_parameters(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as ``module.named_parameters`` does, with their names in the bare model."""
    own = module.named_parameters(remove_duplicate=remove_duplicate)
    if not any(map(_attributes, module.modules())):  # there are no wrappers
        yield from own
        return
    paths = bare_paths(module)
    for name, parameter in own:
        yield _bare_name(name, paths), parameter


def parameters_in(objects: Mapping[str, Any], remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters of all modules among the objects, by their names in the state.

    remove_duplicate: whether a tied one has only the first of its names in each module.
    """
    # Not those in state dicts: hooks of a module may give other tensors there than its parameters.
    modules = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
    return {f"{n}.{path}": p for n, module in modules.items() for path, p in named_parameters(module, remove_duplicate)}


def broadcast_buffers(module: nn.Module) -> set[str]:
    """Return the names, in the bare model, of the buffers that DistributedDataParallel copies from rank 0 to all."""
    found: set[int] = set()
    for child in module.modules():
        if not isinstance(child, DistributedDataParallel) or not child.broadcast_buffers:
            continue
        if child.process_group.size() == torch.distributed.get_world_size():
            ignored = child.parameters_to_ignore
            found |= {id(buffer) for name, buffer in child.module.named_buffers() if name not in ignored}
    inside = bare(module)
    paths = bare_paths(inside)
    return {_bare_name(name, paths) for name, buffer in inside.named_buffers() if id(buffer) in found}


def bare_paths(module: nn.Module) -> dict[str, str]:
    """Map the path of the module and of every module inside it to the path in the bare model."""
    modules = dict(module.named_modules(remove_duplicate=False))
    paths = {"": ""}
    for path in modules:  # a module comes before the modules inside it
        if path:
            outer, _, name = path.rpartition(".")
            inside = paths[outer]
            paths[path] = inside if name in _attributes(modules[outer]) else _joined(inside, name)
    return paths


def unwrapped_name(name: str) -> str:
    """Return the name of a tensor without what wrappers add: ``_orig_mod.`` anywhere, ``module.`` at the beginning."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED).removeprefix("module.")


def own_loading(module: nn.Module) -> frozenset[str]:
    """Return the paths in the bare model of the modules that load their tensors by code that is not PyTorch's layers'.

    Such code may accept a state of other shapes than the present one, as that of observers of quantization does.
    """
    paths = bare_paths(module)
    return frozenset(
        paths[path]
        for path, child in module.named_modules(remove_duplicate=False)
        if any(
            "_load_from_state_dict" in vars(kind) and not f"{kind.__module__}.".startswith("torch.nn.")
            for kind in type(child).__mro__
        )
    )


def may_rename(module: nn.Module) -> bool:
    """Whether ``load_state_dict`` of a module runs code that may rename keys, such as those of its earlier versions."""
    hooks = [hook for child in module.modules() for hook in child._load_state_dict_pre_hooks.values()]
    return bool(own_loading(module)) or any(not hook.__module__.startswith("torch.distributed.") for hook in hooks)


def state_dict(module: nn.Module, **options: Any) -> Any:
    """Return ``module.state_dict(**options)`` with the names of the bare model, also in its metadata.

    Wrappers of tensors are replaced by their parts (``state/subclasses.py``).
    """
    state, paths = plain_state(module, module.state_dict(**options)), bare_paths(module)
    if all(path == inside for path, inside in paths.items()):
        return state
    renamed = OrderedDict((_bare_name(name, paths), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:  # a wrapper comes before its module, so the module's metadata wins
        renamed._metadata = {_bare_name(path, paths): entry for path, entry in metadata.items()}  # type: ignore[attr-defined]
    return renamed


def load_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state dict that has the names of the bare model into a module, which may be wrapped."""
    paths = bare_paths(module)
    if any(path != inside for path, inside in paths.items()):
        named = OrderedDict((name, state[b]) for name in module.state_dict() if (b := _bare_name(name, paths)) in state)
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            versions = {path: metadata[inside] for path, inside in paths.items() if inside in metadata}
            named._metadata = versions  # type: ignore[attr-defined]
        state = named
    if strict:
        module.load_state_dict(state)
    else:
        module.load_state_dict(state, strict=False)


def _inside(thing: Any) -> Any:
    """Return the object directly inside a wrapper; None if ``thing`` is not a wrapper."""
    if isinstance(thing, nn.Module):
        names = _attributes(thing)
        return thing._modules[names[0]] if names else None
    try:
        inner = getattr(thing, "optimizer", None)
    except Exception:  # a dictionary whose keys are attributes may raise KeyError; then it is no wrapper
        return None
    packages = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__}
    if isinstance(thing, Optimizer) and packages.isdisjoint(_SHARE_STATE):
        return None  # its own step, and perhaps its own state, is not that of the optimizer inside
    if (
        isinstance(inner, Optimizer)
        and getattr(thing, "param_groups", None) is inner.param_groups
        and getattr(thing, "state", None) is inner.state
        and thing.state_dict().keys() == inner.state_dict().keys()
    ):
        return inner
    return None


def _attributes(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes in which a wrapper keeps the wrapped module; none if there is more in it, or no wrapper."""
    if isinstance(module, torch.jit.ScriptModule) or module._parameters or module._buffers:
        return ()
    names = tuple(module._modules)
    if names == _OF_FABRIC and type(module).__module__.endswith("fabric.wrappers"):
        return names
    if len(names) != 1:
        return ()
    (name,) = names
    wraps = name in _WRAPPED or (name == "module" and isinstance(module, DistributedDataParallel | DataParallel))
    return names if wraps else ()


def _bare_name(name: str, paths: Mapping[str, str]) -> str:
    """Return the name of a parameter or buffer in the bare model. Some wrappers already use that name."""
    path = name
    while path not in paths:
        path = path.rpartition(".")[0]
    inside = paths[path]
    return name if inside == path else (inside + name[len(path) :]).removeprefix(".")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
