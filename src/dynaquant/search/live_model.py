"""The model of a training as the subject of a metric: other weights for one evaluation, training as before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynaquant.engine import kernels
from dynaquant.engine.kernels.reused import ReusedMemory
from dynaquant.engine.quantize import candidate as candidates
from dynaquant.engine.quantize.candidate import CandidateWeights
from dynaquant.errors import EvaluateError
from dynaquant.garbage import collection_resumed
from dynaquant.ranks.dtensors import abandon_forward, is_sharded, local_of, memory_of
from dynaquant.search.evaluation import Evaluate, ParameterValues, number_of
from dynaquant.state.subclasses import inner_tensors, is_packed, is_wrapper
from dynaquant.state.wrappers import named_parameters
from dynaquant.training.hash_cache import sample_of
from dynaquant.training.objects import parameters_of
from dynaquant.training.snapshot import Snapshot, has_own_train

log = logging.getLogger("dynaquant")

_TOO_SMALL = (
    "the device has no memory for a candidate beside the model; from now on, candidates take the place of the weights, "
    "which wait in host memory. That takes longer"
)
_WRITES = (
    "evaluate writes to the weights in training, which it reaches by references of its own: an optimizer's eval(), or "
    "an average that takes the place of the weights. So it does not see the weights that a restore would return. Make "
    "it write to model.parameters() of the model that it gets, and put back all that it writes elsewhere"
)


class LiveModel:
    """The model of a training, as a ``Subject``."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self._in_place = False  # whether a device has been too small for a candidate beside the model
        self._warned = False  # that the metric writes to the weights in training

    def values(self, candidate: CandidateWeights, reused: ReusedMemory) -> dict[str, ParameterValues]:
        """Return functions for the values of those weights of a candidate that are parameters of the model."""
        parameters = parameters_of(self.module)
        found: dict[str, ParameterValues] = {}
        for name, tensor in candidate.items():
            if (parameter := parameters.get(name)) is not None:
                # Values of sharded parameters are copied into them, one after another, so their memory is not kept.
                empty = kernels.empty if is_sharded(parameter) else partial(reused.empty, name)
                found[name] = partial(candidates.values, tensor, parameter.device, empty)
        return found

    def score(self, values: Mapping[str, ParameterValues], evaluate: Evaluate) -> float:
        """Return ``evaluate`` of the model with other values for some parameters: see the function ``score``.

        If a device has not enough memory for a candidate beside the model, it takes the place of the weights from then
        on, and these wait in host memory.
        """
        parameters = parameters_of(self.module)
        own = {name.removeprefix("model."): value for name, value in values.items() if name in parameters}
        begun, before = False, _marks(self.module)

        def noted(model: Any) -> float:
            nonlocal begun
            begun = True
            return evaluate(model)

        try:
            found = score(self.module, own, noted, self._in_place)
            if not self._warned and _marks(self.module) != before:
                self._warned = True
                log.warning(_WRITES)
            return found
        except torch.OutOfMemoryError:
            if self._in_place or not any(map(_on_device, self.module.parameters())):
                raise
            self._in_place = True
            # Another rank may wait for what ``evaluate`` has begun to communicate, so there it does not begin again.
            if begun and _has_other_ranks():
                raise
        # After the block above: its exception would keep what was allocated.
        if not _has_other_ranks() or dist.get_rank() == 0:
            log.warning(_TOO_SMALL)
        return score(self.module, own, evaluate, self._in_place)


def score(model: nn.Module, values: Mapping[str, ParameterValues], evaluate: Evaluate, in_place: bool = False) -> float:
    """Return ``evaluate`` of the model with other values for some parameters, by their names in the bare model.

    ``evaluate`` sees copies of parameters and buffers; sharded parameters have other values meanwhile. in_place: those
    on devices, too. When this returns or raises, training mode and the global random number generators are as before.
    All scores from one state of the generators see the same random numbers.

    Raises ValueError if ``evaluate`` does not return a number, EvaluateError if it has changed a frozen parameter, and
    whatever ``evaluate`` raises.
    """
    before, frozen = Snapshot(model), _frozen(model)
    writable = [p for name, p in named_parameters(model) if name not in frozen or name in values]
    staying = _InPlace(writable, in_place)

    def put_back() -> None:
        before.put_back()
        staying.put_back()

    try:
        with torch.no_grad():
            _substitute(model, values, staying)
            with collection_resumed():
                number = number_of(evaluate(model), "evaluate")
    except Exception as error:
        abandon_forward(model)
        put_back()
        _check_frozen(model, frozen, error)
        raise
    finally:
        try:
            put_back()
        except BaseException:  # a signal interrupted it
            put_back()
            raise
    _check_frozen(model, frozen)
    return number


def _check_frozen(model: nn.Module, before: Mapping[str, Any], cause: Exception | None = None) -> None:
    """Raise EvaluateError if a frozen parameter has changed."""
    if changed := [name for name, found in _frozen(model).items() if found != before[name]]:
        raise EvaluateError(
            f"evaluate has changed the frozen parameter {changed[0]}, also in training; "
            "make evaluate copy the tensors that it writes to"
        ) from cause


def _substitute(model: nn.Module, values: Mapping[str, ParameterValues], staying: _InPlace) -> None:
    """Give the model other parameters and copies of its buffers. Frozen parameters are large, and not copied.

    staying: parameters that stay, and get other values. Frozen ones of a class of their own stay, as layers may need
    that class.
    """
    named = dict(named_parameters(model))
    staying.write({id(named[name]): value for name, value in values.items()})
    # By memory: a state has one tensor for several parameters that share their data.
    given = {_memory(named[name]): value for name, value in values.items()}

    def replacement(parameter: nn.Parameter) -> nn.Parameter:
        value = given.get(_memory(parameter))
        # The others are copied too: a backward pass must not reach their ``.grad``, and some layers write to weights
        # when they are called (``nn.Embedding(max_norm=…)``).
        if value is None:
            stays_as_it_is = id(parameter) in shared and id(parameter) not in merged
            copied = parameter.detach() if stays_as_it_is else parameter.detach().clone()
        elif isinstance(value, Tensor):
            copied = value.to(parameter.device, parameter.dtype, copy=True)
        else:
            copied = value().to(parameter.device, parameter.dtype)
        return _of_class(parameter, copied)

    def stays(parameter: nn.Parameter) -> bool:
        own_class = type(parameter) is not nn.Parameter and id(parameter) in shared
        return is_sharded(parameter) or parameter in staying or (own_class and _memory(parameter) not in given)

    shared = {id(named[name]) for name in _frozen(model)}
    # A layer may merge others into its frozen weight when it is evaluated, as loralib's do.
    merged = {id(p) for module in model.modules() if has_own_train(module) for p in module._parameters.values()}
    replacements: dict[int, Any] = {
        id(parameter): parameter if stays(parameter) else replacement(parameter) for parameter in named.values()
    }
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replacements[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copy = copies.setdefault(id(buffer), buffer.clone())
                if type(buffer) is Tensor:  # the attributes of others may be the tensors that they consist of
                    vars(copy).update(vars(buffer))


def _of_class(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return values as a parameter of the same class and with the same attributes.

    A metric may differentiate by it, in a block ``torch.enable_grad()``.
    """
    if not issubclass(type(parameter), nn.Parameter):  # its attributes may be the tensors that it consists of
        return nn.Parameter(values, parameter.requires_grad)
    found: nn.Parameter = Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


def _marks(model: nn.Module) -> list[Any]:
    """Return what differs if something has written to weights in training: how often PyTorch has, and a few samples.

    Not of sharded ones, which candidates take the place of. Weights on devices have no samples: they would take time.
    """
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_inference() and not is_sharded(p)]
    few = [sample_of(parameter) for parameter in trained[:16] if parameter.is_cpu and not is_wrapper(parameter)]
    return [*(parameter._version for parameter in trained), *few]


def _frozen(model: nn.Module) -> dict[str, list[bytes]]:
    """Return samples of the values of each frozen parameter by name.

    PyTorch's count of writes tells too little, as it leaves out those through ``.data``, and too much: a layer that is
    parametrized in each forward pass, as by PEFT's ``target_parameters``, writes what is there already. Parameters that
    their own layer writes to are left out: those with a largest norm, and packed ones, which a layer may pack otherwise
    to evaluate.
    """
    writing = [m for m in model.modules() if getattr(m, "max_norm", None) is not None]
    written = {id(parameter) for module in writing for parameter in module._parameters.values()}
    written |= {id(parameter) for parameter in model.parameters() if is_packed(parameter)}

    def samples(parameter: Tensor) -> list[bytes]:
        held = list(inner_tensors(parameter).values()) if is_wrapper(parameter) else [local_of(parameter)]
        return [sample_of(each) for each in held]

    return {
        name: samples(parameter)
        for name, parameter in named_parameters(model)
        if not parameter.requires_grad and not parameter.is_inference() and id(parameter) not in written
    }


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return memory_of(tensor), tensor.stride(), tensor.device


class _Held(NamedTuple):
    """A parameter, what this rank holds of it, the values of that before, and its gradient before."""

    parameter: nn.Parameter
    local: Tensor
    before: Tensor
    gradient: Tensor | None


class _InPlace:
    """Remembers the values and gradients of parameters that ``evaluate`` may change: sharded ones.

    FSDP2 keeps references to its parameters, so they cannot be replaced by others, as those of other models are. What
    is remembered takes as much memory as this rank's part of them, on the same device.

    parameters: those that may change; plain ones are left alone. on_devices: also remember plain ones on devices, and
    all in host memory.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], on_devices: bool) -> None:
        self._held: dict[int, _Held] = {}
        for parameter in parameters:
            if is_sharded(parameter) or (on_devices and _on_device(parameter)):
                local = _data_of(parameter)
                before = local.to(kernels.HOST, copy=True) if on_devices else local.clone()
                self._held[id(parameter)] = _Held(parameter, local, before, parameter.grad)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._held

    def write(self, values: Mapping[int, Any]) -> None:
        """Write other values, of this rank's part. values: tensors, or functions that return them, by ``id``."""
        for key, held in self._held.items():
            held.parameter.grad = None
            if (value := values.get(key)) is not None:
                held.local.copy_(value if isinstance(value, Tensor) else value())

    def put_back(self) -> None:
        """Put values and gradients back, bit for bit. Gathered parameters must be freed before. May be called again."""
        for held in self._held.values():
            held.local.copy_(held.before)
            held.parameter.grad = held.gradient


def _on_device(parameter: Tensor) -> bool:
    return parameter.device.type not in ("cpu", "meta")


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _data_of(parameter: Tensor) -> Tensor:
    # Through ``.data``, writes are not counted. A backward pass would refuse parameters that were written to since the
    # forward pass, but these will have their values again.
    return local_of(parameter).data
