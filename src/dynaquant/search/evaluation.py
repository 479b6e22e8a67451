"""The user's metric: a function of a model, also one that is the mean of numbers of batches, such as ``LossOn``.

``LossOn`` evaluates batch norms by the statistics of the batches, as training does. Their running statistics belong to
the weights in training. With quantized weights they are wrong, by more than the quantization itself (docs/decisions.md,
"What is wrong with batch norm?"). Training does not use them, and brings them up to date within a few steps after a
restore.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dynaquant.engine.kernels.reused import ReusedMemory
from dynaquant.engine.quantize.candidate import CandidateWeights

Evaluate = Callable[[Any], float]
"""The user's metric: takes a bare model, or a dictionary of several by name, and returns a number."""
ParameterValues = Tensor | Callable[[], Tensor]
"""Values for a parameter, or a function that returns them. Functions are called one at a time, to save memory."""


class Subject(Protocol):
    """What a metric scores: the model of a training, or a state that was read. Weights have the names of the state.

    In its place candidates are put. A search knows no more of it.
    """

    def values(self, candidate: CandidateWeights, reused: ReusedMemory) -> Mapping[str, ParameterValues]:
        """Return the values of a candidate, for ``score``. reused: memory for one candidate after another."""

    def score(self, values: Mapping[str, ParameterValues], evaluate: Evaluate) -> float:
        """Return the metric with other values for some weights. Names that the subject does not have are ignored.

        Nothing has changed when this returns or raises. Raises ValueError if ``evaluate`` does not return a number, and
        whatever it raises.
        """

    @property
    def module(self) -> nn.Module:
        """The module that has the weights, or one without layers."""


@runtime_checkable
class OnBatches(Protocol):
    """An ``evaluate`` that is the mean of one number for each of its batches, such as ``LossOn``.

    A search then evaluates most candidates on a few batches. The metric is the mean of ``losses`` over all batches: a
    save calls only ``losses``. The number of a batch must not depend on which batches came before.
    """

    def __call__(self, model: Any) -> float:
        """Return the mean over all batches."""

    def __len__(self) -> int:
        """Return the number of batches."""

    def losses(self, model: Any, batches: Sequence[int]) -> list[float]:
        """Return the number of each of these batches. batches: indices, from 0."""


class LossOn:
    """An ``evaluate`` made of held-out batches and a loss function: the mean loss in evaluation mode. Lower is better.

    batches: a list, as evaluations use them again and again, on the model's device. loss_fn: ``loss_fn(model, batch)``
    returns the mean loss of a batch, as a number or a tensor with one element. All batches have equal weight.

    batch_statistics: batch norms that train normalize by the statistics of each batch, as they do in training. The
    running statistics in a checkpoint are those of the weights in training, and do not fit quantized ones. False uses
    them all the same, for checkpoints that are used without training. So does a batch of one sample.

    A save scores most candidates on some of the batches only (``OnBatches``); the checkpoint and the weights in
    training are scored on all of them.

    Raises ValueError if there are no batches, and TypeError for an iterator, which could be used only once.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        loss_fn: Callable[[Any, Any], Tensor | float],
        *,
        batch_statistics: bool = True,
    ) -> None:
        if not hasattr(batches, "__getitem__") or not hasattr(batches, "__len__"):
            raise TypeError(
                "LossOn uses its batches at every evaluation: give a list, e.g. list(islice(loader, 20)), not "
                f"{type(batches).__name__}"
            )
        if len(batches) == 0:
            raise ValueError("LossOn needs at least one batch")
        self._batches, self._loss_fn, self._batch_statistics = batches, loss_fn, batch_statistics

    def __call__(self, model: Any) -> float:
        """Return the mean loss of the model on the batches."""
        return mean_of_batches(self.losses(model, range(len(self))))

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def uses_batch_statistics(self, model: Any) -> bool:
        """Whether any batch norm of the model normalizes by the statistics of the batches here."""
        return self._batch_statistics and any(map(_batch_norms, _models(model)))

    def losses(self, model: Any, batches: Sequence[int]) -> list[float]:
        """Return the model's loss on each of these batches. batches: indices."""
        return [self._loss(model, self._batches[index]) for index in batches]

    @torch.no_grad()
    def _loss(self, model: Any, batch: Any) -> float:
        models = _models(model)
        try:
            with _evaluation_mode(models, self._batch_statistics):
                return number_of(self._loss_fn(model, batch), "the loss_fn of LossOn")
        except ValueError as error:  # a batch of one sample has no statistics; the last of a loader may be one
            if not self.uses_batch_statistics(model) or "more than 1 value per channel" not in str(error):
                raise
        with _evaluation_mode(models, batch_statistics=False):
            return number_of(self._loss_fn(model, batch), "the loss_fn of LossOn")


def _models(model: Any) -> list[nn.Module]:
    return list(model.values()) if isinstance(model, Mapping) else [model]


@contextmanager
def _evaluation_mode(models: Sequence[nn.Module], batch_statistics: bool) -> Iterator[None]:
    """Put models into evaluation mode, and back into the mode of each layer at the end.

    batch_statistics: whether batch norms normalize by the statistics of each batch. Their running statistics stay as
    they are. Layers that a training keeps in evaluation mode use running statistics. So does ``SyncBatchNorm``, which
    would communicate between ranks.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    layers = [layer for model in models for layer in _batch_norms(model)] if batch_statistics else []
    before = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    try:
        for model in models:
            model.eval()
        for layer in layers:
            layer.training, layer.momentum, layer.num_batches_tracked = True, 0.0, None
        yield
    finally:
        for layer, (momentum, tracked) in zip(layers, before, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, tracked
        for module, mode in modes:
            module.training = mode


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms that normalize by the statistics of batches while the model trains."""
    found = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    layers = [each for each in found if not isinstance(each, nn.SyncBatchNorm)]
    if model.training:
        return [each for each in layers if each.training]
    # The whole model is in evaluation mode, e.g. after a validation. A layer whose weights train is trained.
    return [each for each in layers if any(parameter.requires_grad for parameter in each.parameters())]


def on_batches(evaluate: Evaluate) -> OnBatches | None:
    """Return the metric if it can be evaluated on some of its batches, otherwise None.

    A subclass of ``LossOn`` that changes what a call returns is a metric of its own.
    """
    if not isinstance(evaluate, OnBatches) or not callable(getattr(evaluate, "losses", None)):
        return None  # an attribute of that name may be something else, such as a list of past losses
    changed = isinstance(evaluate, LossOn) and type(evaluate).__call__ is not LossOn.__call__
    return None if changed and type(evaluate).losses is LossOn.losses else evaluate


def losses_on(metric: OnBatches, model: nn.Module, batches: Sequence[int]) -> list[float]:
    """Return the metric's number of each of these batches. Raises ValueError if it returns anything else."""
    result = metric.losses(model, batches)
    try:
        numbers = [_as_float(number) for number in result]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"losses of evaluate returned {reprlib.repr(result)}; it must return one number for each batch"
        ) from None
    if len(numbers) != len(batches):
        raise ValueError(
            f"losses of evaluate returned {len(numbers)} numbers for {len(batches)} batches; it must return one number "
            "for each index in batches, in that order"
        )
    return numbers


def number_of(result: Any, source: str) -> float:
    """Return what a function of the user has returned, as a float. source: names the function, for the message.

    Raises ValueError if it is not one number. A number given as text is none: nobody means to return one.
    """
    try:
        return _as_float(result)
    except (TypeError, ValueError, RuntimeError):
        but = ", not text" if isinstance(result, str | bytes) else ""
        raise ValueError(f"{source} returned {reprlib.repr(result)}; it must return one number{but}") from None


def _as_float(result: Any) -> float:
    if isinstance(result, str | bytes | bytearray):
        raise TypeError
    return float(result.item() if isinstance(result, np.ndarray) else result)  # of one element, as tensors may be


def mean_of_batches(losses: Sequence[float]) -> float:
    """Return the mean of the numbers of all batches."""
    return math.fsum(losses) / len(losses)


def of_several(evaluate: Evaluate) -> Evaluate:
    """Turn a metric of a dictionary of models into a metric of an ``nn.ModuleDict``."""
    return called_by(lambda function, modules, *rest: function(dict(modules.items()), *rest), evaluate)


def called_by(call: Callable[..., Any], evaluate: Evaluate) -> Evaluate:
    """Return a metric whose functions are called by ``call``, which gets the function and its arguments."""
    batched = on_batches(evaluate)
    return partial(call, evaluate) if batched is None else _CalledOnBatches(call, batched)


class _CalledOnBatches:
    """A metric on batches, for ``called_by``."""

    def __init__(self, call: Callable[..., Any], evaluate: OnBatches) -> None:
        self._evaluate, self._call = evaluate, call

    def __call__(self, model: Any) -> float:
        result: float = self._call(self._evaluate, model)
        return result

    def __len__(self) -> int:
        return len(self._evaluate)

    def uses_batch_statistics(self, model: Any) -> bool:
        own = self._evaluate
        return isinstance(own, LossOn | _CalledOnBatches) and self._call(own.uses_batch_statistics, model)

    def losses(self, model: Any, batches: Sequence[int]) -> list[float]:
        results: list[float] = self._call(self._evaluate.losses, model, batches)
        return results


def uses_batch_statistics_of(evaluate: Evaluate, model: nn.Module) -> bool:
    """Whether a metric evaluates batch norms of the model by the statistics of its batches."""
    return isinstance(evaluate, LossOn | _CalledOnBatches) and evaluate.uses_batch_statistics(model)


def degradation(original: float, restored: float, higher_is_better: bool) -> float:
    """Return how much worse ``restored`` is, relative to the absolute value of ``original``. Negative if it is better.

    If ``original`` is exactly zero, any difference is infinite. NaN if either is NaN.
    """
    worse = original - restored if higher_is_better else restored - original
    if worse == 0:
        return 0.0
    return worse / abs(original) if original else worse * math.inf
