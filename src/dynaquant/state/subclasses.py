"""Tensor subclasses with a state of their own, such as 4-bit weights: the plain tensors that they are made of.

There are two kinds:

- A *wrapper*, as torchao has them, is made of other tensors and has the method ``__tensor_flatten__``. A checkpoint
  stores these tensors in place of the weight ``0.weight``: ``0.weight.qdata``, ``0.weight.scale``.
- A *packed parameter*, as bitsandbytes has them, has values of its own, and an attribute ``quant_state`` with other
  tensors. Its module adds these to the state dict: ``0.weight.absmax``. PyTorch's ``load_state_dict`` does not load
  them, so a restore sets them (``set_packed``).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, memory_of

CLASS = "class"
"""The key of the class in the description of a tensor."""
PACKED = ("quant_state", "state2")
"""The attribute in which a packed parameter keeps what it needs beside its values, and one in that for more of it."""
_PLAIN = (Tensor, nn.Parameter)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor only wraps others. DTensors and nested tensors do not count."""
    return hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor) and not tensor.is_nested


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor has values of its own, at regular places in memory."""
    return tensor.layout == torch.strided and not tensor.is_nested and not is_wrapper(tensor)


def is_packed(tensor: Any) -> bool:
    """Whether a tensor is a packed parameter. Before bitsandbytes packs one, it is an ordinary parameter."""
    return callable(getattr(getattr(tensor, "quant_state", None), "from_dict", None))


def inner_tensors(wrapper: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a wrapper is made of, by path, detached and in the same memory."""
    found: dict[str, Tensor] = {}
    for name in wrapper.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        own = getattr(wrapper, name)
        inner = inner_tensors(own) if is_wrapper(own) else None
        found.update({name: own.detach()} if inner is None else {f"{name}.{n}": each for n, each in inner.items()})
    return found


def plain_state(module: nn.Module, state: Any) -> Any:
    """Return the state dict of a module with the inner tensors of wrappers in their place.

    Its metadata describes each wrapper and packed parameter, by name: the class, and what else a state must agree with.
    """
    wrappers = {name: value for name, value in state.items() if is_wrapper(value)}
    packed = {name: p for name, p in module.named_parameters(remove_duplicate=False) if is_packed(p)}
    if not wrappers and not packed:
        return state
    result: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        result.update(
            {f"{name}.{n}": p for n, p in inner_tensors(value).items()} if name in wrappers else {name: value}
        )
    described = {name: _description(tensor) for name, tensor in {**wrappers, **packed}.items()}
    result._metadata = {**getattr(state, "_metadata", {}), **described}  # type: ignore[attr-defined]
    return result


def _description(tensor: Tensor) -> dict[str, str]:
    found = {CLASS: type(tensor).__qualname__}
    if is_wrapper(tensor):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        values = context if isinstance(context, Mapping) else {"context": context}
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        found |= {str(key): _ADDRESS.sub("", repr(value)) for key, value in listed.items()}
        inner = {name: _description(part) for name in names if is_wrapper(part := getattr(tensor, name))}
        found |= {f"{name}.{key}": text for name, each in inner.items() for key, text in each.items()}
    return found


def descriptions_in(metadata: Any) -> dict[str, Mapping[str, str]]:
    """Return the descriptions of wrappers and packed parameters in the metadata of a state dict, by name."""
    entries = metadata.items() if isinstance(metadata, Mapping) else ()
    return {name: entry for name, entry in entries if isinstance(entry, Mapping) and CLASS in entry}


def description_problem(name: str, own: Mapping[str, str], stored: Mapping[str, str]) -> str | None:
    """Return the problem with a tensor whose stored description contradicts the present one; None if there is none.

    Only settings that both have are compared, as versions of a package may describe more or less. Of a class whose
    ``__tensor_flatten__`` gives no mapping, all settings are one text.
    """
    other = [key for key in own if key in stored and stored[key] != own[key]]
    was, now = (", ".join(f"{key} {each[key]}" for key in other) for each in (stored, own))
    return f"{name} was of {was} and is of {now}" if other else None


def owner_of(name: str, owners: Collection[str]) -> str | None:
    """Return the name among ``owners`` that another name lies below, as ``0.weight.absmax`` below ``0.weight``."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in owners:
            return name
    return None


def set_packed(module: nn.Module, states: Mapping[str, Mapping[str, Tensor]], paths: Mapping[str, str]) -> None:
    """Set what packed parameters keep beside their values.

    states: by name of the parameter in the bare model, as the module's state dict has it below that name. paths: of the
    modules in the bare model, by their own.
    """
    for path, child in module.named_modules(remove_duplicate=False):
        for key, parameter in child._parameters.items():
            state = states.get(f"{paths[path]}.{key}".removeprefix("."))
            if state is not None and is_packed(parameter):
                found = type(parameter.quant_state).from_dict(dict(state), device=parameter.device)
                parameter.quant_state = found
                if hasattr(child, "quant_state"):
                    child.quant_state = found


def check_subclasses(name: str, module: nn.Module, own_loading: Collection[str]) -> None:
    """Raise StateError if a parameter or buffer has a state that the module's state dict lacks, or that nothing loads.

    own_loading: paths of the modules that load their tensors by code of their own.
    """
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    special = {path: t for path, t in tensors.items() if type(t) not in _PLAIN and not is_sharded(t)}
    for path, tensor in special.items():
        if isinstance(tensor, UninitializedTensorMixin):
            raise StateError(
                f"{name}.{path} has no shape yet ({type(tensor).__qualname__}); call the model once on a batch before "
                "you make the Checkpointer"
            )
    if not special:
        return
    state = module.state_dict()
    special = {path: tensor for path, tensor in special.items() if type(state.get(path)) in _PLAIN}
    stored = {memory_of(value) for value in state.values() if type(value) in _PLAIN and not value.is_nested}
    for path, tensor in special.items():
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        for attribute, inside in _tensors_beside(tensor):
            if not any(memory_of(each) in stored for each in inside):
                raise StateError(
                    f"{name}.{path} is a {kind}, whose {attribute!r} is not in the model's state_dict(), so a restore "
                    "would lose it; register it as a buffer of its module, or, if it is only scratch space, set it "
                    "after you have made the Checkpointer"
                )
        unloaded = [key for key in state if owner_of(key, (path,)) and path.rpartition(".")[0] not in own_loading]
        if unloaded and not is_packed(tensor):
            raise StateError(
                f"{name}.{path} is a {kind}, and {unloaded[0]} of the model's state_dict() belongs to it, but "
                "load_state_dict() does not take it; give its module a _load_from_state_dict that does"
            )


def _tensors_beside(tensor: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the attributes of a tensor that hold other tensors, with these. Gradients do not count."""
    for name, value in vars(tensor).items():
        if name.endswith("grad"):  # such as Megatron's main_grad, which the next backward pass fills again
            continue
        inside = [value] if isinstance(value, Tensor) else []
        if hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type):
            inside = [each for each in vars(value).values() if isinstance(each, Tensor)]
        if inside := [
            each for each in inside if type(each) in _PLAIN and each.layout == torch.strided and each.numel()
        ]:
            yield name, inside
