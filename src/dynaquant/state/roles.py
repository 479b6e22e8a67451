"""Finds the role and layer type of every tensor of a state, and applies the user's patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from dynaquant.engine.bound import Bound
from dynaquant.engine.label import Label, Role
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES, dtype_name
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import memory_of
from dynaquant.state.subclasses import inner_tensors, is_wrapper, owner_of
from dynaquant.state.wrappers import bare_paths, named_parameters, parameters_in

_GIVEN = tuple(role for role in get_args(Role) if role != "bound")
"""The roles that a pattern may name."""

HALVES = (torch.bfloat16, torch.float16)
"""The dtypes of weights that may have master weights."""
_MOMENTS: dict[str, Role] = {
    "exp_avg": "first_moment",
    "momentum_buffer": "first_moment",
    "exp_avg_sq": "second_moment",
    "max_exp_avg_sq": "second_moment",
    "square_avg": "second_moment",
    "sum": "second_moment",
}
"""Roles by key in the state of an optimizer of ``torch.optim``. Tensors under other keys are ``exact``."""
SECOND_MOMENTS = tuple(key for key, role in _MOMENTS.items() if role == "second_moment")
"""Keys of second moments in the state of an optimizer."""

_LAYER_TYPES: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    (nn.modules.conv._ConvNd, "conv"),
    ((nn.Linear, nn.Bilinear, nn.MultiheadAttention), "linear"),
    (nn.RNNBase, "recurrent"),
    ((nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm), "norm"),
)

_AVERAGES = {
    ("torch", "AveragedModel"): "module.",
    ("timm", "ModelEmaV2"): "module.",
    ("timm", "ModelEmaV3"): "module.",
    ("ema_pytorch", "EMA"): "ema_model.",
    ("torch_ema", "ExponentialMovingAverage"): "shadow_params.",
}
"""What the names of averages of weights begin with in the state of an object, by its package and class."""


def layer_type(module: nn.Module) -> str:
    """Return the layer type of a module's own parameters: ``embedding``, ``conv``, ``linear``, …, or ``other``."""
    return next((name for kinds, name in _LAYER_TYPES if isinstance(module, kinds)), "other")


def labels(
    tensors: Mapping[str, Tensor],
    objects: Mapping[str, Any],
    overrides: Mapping[str, str | Bound] | None = None,
    vectors: bool = False,
    exact: Collection[str] = (),
    idle: Collection[str] | None = None,
    compared: Collection[str] = (),
) -> dict[str, Label]:
    """Return the label of every tensor of a state.

    tensors: as ``flatten`` names them. objects: the objects whose state this is, by name; the names of an object's
    tensors begin with its name. overrides: role or bound by glob pattern over tensor names, e.g.
    ``{"*.lm_head.weight": "exact"}``; the last pattern that matches counts. vectors: whether parameters of one
    dimension (biases, norms) are weights. exact: names of the optimizers whose moments are stored exactly unless a
    pattern says otherwise (``training/moment_uses.py``). idle: what ``untrained`` returns, if that is known. compared:
    names of the parameters that are exact unless a pattern says otherwise, as ``compared_across_steps`` returns them.

    Only parameters of models (``"model"``, ``"model.G"``) become weights, since only models are evaluated, and only if
    they train. Those of a known average of a model become averages. Other parameters are exact unless a pattern says
    otherwise. A pattern may use any name of a tied parameter. It gives its role to the matching tensors that can have
    it.

    Raises StateError for a pattern that matches no tensor, an unknown role, or one that no matching tensor can have.
    """
    result = dict.fromkeys(tensors, Label("exact"))
    of_role: dict[Role, Label] = {}
    frozen = untrained(objects) if idle is None else idle
    parameters: dict[str, str] = {}  # each name of a parameter, and its first name, which is among the tensors
    for prefix, thing in objects.items():
        if isinstance(thing, nn.Module):
            result.update(_module_labels(prefix, thing, tensors, vectors, {*frozen, *compared}))
            parameters.update(_parameter_names(prefix, thing) if overrides else {})
        elif isinstance(thing, torch.optim.Optimizer):
            own = f"{prefix}.state."
            for name in tensors if prefix not in exact else ():
                if name.startswith(own) and (role := optimizer_role(name, tensors)) != "exact":
                    result[name] = of_role.setdefault(role, Label(role))
        for name in _averages_in(prefix, thing, tensors):
            if quantizable(tensors[name], vectors):
                result[name] = replace(result[name], role="average")
    if not overrides:
        return result
    named = {**{name: name for name in result}, **parameters}
    first_names = set(parameters.values())
    owners = {name: owner for name in result if (owner := owner_of(name, first_names)) is not None}
    for pattern, wanted in overrides.items():
        # Most patterns that a program makes are names; there may be thousands.
        names = [pattern] if pattern in named else [name for name in named if matches(name, pattern, objects)]
        chosen = {parameters.get(name, name) for name in names}
        # A wrapper is not among the tensors, but its inner tensors are.
        wrapped = {name for name, owner in owners.items() if owner in chosen and owner not in result}
        _override(result, tensors, parameters, pattern, wanted, (chosen & result.keys()) | wrapped)
    omitted = (name for name, label in result.items() if label.role == "omit")
    trained = parameters.keys() - set(frozen)
    if changing := sorted(name for name in omitted if owners.get(name, name) in trained):
        raise StateError(
            f"{changing[0]} has role 'omit', but it trains, so a restore would lose its values; freeze it with "
            f"requires_grad_(False), or add a pattern after the one that omits it, e.g. {{{changing[0]!r}: 'weight'}}"
        )
    return result


def _averages_in(object_name: str, thing: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of an object that are averages of weights. No package is imported."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(thing).__mro__)
    begin = next((_AVERAGES[kind] for kind in kinds if kind in _AVERAGES), None)
    if begin is None:
        return []
    if isinstance(thing, nn.Module):
        named = (f"{object_name}.{path}" for path, _ in named_parameters(thing) if path.startswith(begin))
        return [name for name in named if name in tensors]
    return [name for name in tensors if name.startswith(f"{object_name}.{begin}")]


def matches(name: str, pattern: str, objects: Mapping[str, Any]) -> bool:
    """Whether a pattern selects the tensor of this name.

    The name of a tensor in an optimizer's state contains the name of its parameter. So that a pattern for parameters
    does not select moments, a pattern for an optimizer's tensors must begin with the optimizer's name.
    """
    first = name.partition(".")[0]
    optimizers = {n.partition(".")[0] for n, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    return fnmatchcase(name, pattern) and (first not in optimizers or pattern.startswith(f"{first}."))


def untrained(objects: Mapping[str, Any], updated: Collection[str] = ()) -> frozenset[str]:
    """Return the names of the parameters that do not train; the first name of tied ones.

    These are parameters without ``requires_grad``, except those that an optimizer has ``updated`` lately: a training
    loop may freeze them for a moment, such as the critic of a GAN while the generator trains. If optimizers update
    some parameters of the models, all parameters of the models that no optimizer updates count as well. Half-precision
    parameters count as trained if an optimizer updates tensors outside the models, since these may be their master
    weights.
    """
    trained = _updated_memory(thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer))
    own = parameters_in(objects)
    of_models = {name: memory_of(parameter) for name, parameter in own.items() if _is_of_model(name)}
    known = trained & set(of_models.values())
    others_trained = trained != known

    def may_have_master(name: str) -> bool:
        return others_trained and own[name].dtype in HALVES

    idle = {name for name, memory in of_models.items() if known and memory not in known and not may_have_master(name)}
    return frozenset(
        name for name, parameter in own.items() if name in idle or not (parameter.requires_grad or name in updated)
    )


def compared_across_steps(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters whose optimizer compares the next gradient with that of its last step.

    LBFGS does so once it has taken a step. It takes their difference for the curvature along that step; weights that
    a restore has rounded would make it noise (docs/decisions.md, "What about LBFGS?").
    """
    comparing = [
        thing
        for thing in objects.values()
        if isinstance(thing, torch.optim.Optimizer)
        and any(isinstance(state, dict) and "prev_flat_grad" in state for state in thing.state.values())
    ]
    if not comparing:
        return frozenset()
    trained = _updated_memory(comparing)
    return frozenset(name for name, parameter in parameters_in(objects).items() if memory_of(parameter) in trained)


def _updated_memory(optimizers: Iterable[torch.optim.Optimizer]) -> set[Any]:
    return {memory_of(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _is_of_model(name: str) -> bool:
    return name.partition(".")[0] == "model"


def optimizer_role(name: str, tensors: Mapping[str, Tensor]) -> Role:
    """Return the role of a tensor in an optimizer's state."""
    state, _, key = name.rpartition(".")
    # Centered RMSprop takes the root of square_avg - grad_avg²: rounding could make the difference negative.
    if key == "square_avg" and f"{state}.grad_avg" in tensors:
        return "exact"
    role = _MOMENTS.get(key, "exact")
    return role if role == "exact" or tensors[name].dtype in QUANTIZABLE_DTYPES else "exact"


def quantizable(parameter: Tensor, vectors: bool = False) -> bool:
    """Whether a parameter is quantized unless a pattern says otherwise. vectors: as for ``labels``."""
    return (
        not is_wrapper(parameter) and parameter.ndim >= (1 if vectors else 2) and parameter.dtype in QUANTIZABLE_DTYPES
    )


def _parameter_names(prefix: str, module: nn.Module) -> dict[str, str]:
    """Map every name of every parameter to its first name."""
    first: dict[int, str] = {}
    names = {}
    for path, parameter in named_parameters(module, remove_duplicate=False):
        names[f"{prefix}.{path}"] = first.setdefault(id(parameter), f"{prefix}.{path}")
    return names


def _module_labels(
    object_name: str, module: nn.Module, tensors: Mapping[str, Tensor], vectors: bool, frozen: Collection[str]
) -> dict[str, Label]:
    found: dict[str, Label] = {}
    paths = bare_paths(module)
    for path, child in module.named_modules():
        prefix = f"{object_name}.{paths[path]}." if paths[path] else f"{object_name}."
        kind = layer_type(child)
        exact = Label("exact", kind)
        weight = exact if _is_discontinuous(child) else Label("weight", kind)
        for name, parameter in child._parameters.items():
            tensor = tensors.get(prefix + name)
            # Only the first name of a tied tensor is among the tensors; its module gives the layer type.
            if tensor is not None:
                trains = _is_of_model(object_name) and prefix + name not in frozen
                found[prefix + name] = weight if trains and quantizable(tensor, vectors) else exact
            elif is_wrapper(parameter):
                inner = (f"{prefix}{name}.{path}" for path in inner_tensors(parameter))
                found.update({path: exact for path in inner if path in tensors})
        for name in child._buffers:
            if prefix + name in tensors:
                found[prefix + name] = Label("buffer", kind)
    return found


def _is_discontinuous(module: nn.Module) -> bool:
    """Whether a small change of its tensors changes what a module makes of them a lot."""
    if not isinstance(module, nn.utils.parametrize.ParametrizationList):
        return False
    # By Householder reflections, this one keeps signs on the diagonal, and truncates it to integers.
    return any(type(each).__qualname__ == "_Orthogonal" for each in module.children())


def _override(
    result: dict[str, Label],
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, str],
    pattern: str,
    role: str | Bound,
    matching: Collection[str],
) -> None:
    if not isinstance(role, Bound) and role not in _GIVEN:
        raise StateError(
            f"roles[{pattern!r}]: {role!r} is not a role; the roles are {', '.join(_GIVEN)}, or a dq.Bound(…)"
        )
    if not matching:
        example = next(iter(result), "model.…")
        raise StateError(f"roles[{pattern!r}] matches no tensor; names look like {example!r}")
    refused = {name: why for name in matching if (why := _why_not(name, role, result[name], tensors, parameters))}
    if len(refused) == len(matching):
        name = min(refused)
        raise StateError(f"roles[{pattern!r}]: {name} {refused[name]}")
    given, bound = ("bound", role) if isinstance(role, Bound) else (role, None)
    for name in set(matching) - refused.keys():
        result[name] = replace(result[name], role=cast(Role, given), bound=bound)


def _why_not(
    name: str, role: str | Bound, label: Label, tensors: Mapping[str, Tensor], parameters: Mapping[str, str]
) -> str | None:
    """Return why a tensor cannot have a role; None if it can."""
    if role == "weight" and name not in parameters:
        return "is not a parameter of a module, so it cannot be a weight"
    if role == "omit" and not label.layer_type:
        return "is not a parameter or buffer of a module, so it cannot be omitted"
    if role in ("first_moment", "second_moment") and _is_of_model(name):
        return "is a tensor of a model, so it cannot be a moment of an optimizer"
    if role in ("weight", "average") and tensors[name].dtype not in QUANTIZABLE_DTYPES:
        return f"is {dtype_name(tensors[name].dtype)}, which cannot be quantized"
    return None
