"""Puts back what the metric of a checkpoint has changed in a Trainer."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from dynaquant.training.load_state import refill
from dynaquant.training.objects import GENERATOR, generator_state, set_generator_state

_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_SEQUENCES = (list, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, frozenset, set, *_SEQUENCES, *_MAPPINGS, Tensor)
_DATASETS = ("train_dataset", "eval_dataset")
"""Attributes that may be lists of millions of examples."""
_MOST_ELEMENTS = 2**16
"""Tensors of up to so many elements are copied. Larger ones are batches that are kept, not counters."""


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Run a block that uses a Trainer. When it ends, whatever is plain in the Trainer is as before.

    Plain are numbers, texts, small tensors, random number generators, and lists, deques, dictionaries, sets and
    dataclasses of them, such as the ``TrainerState`` and the metrics that TRL's loss functions collect. Objects of
    other classes stay as the block leaves them, so that it may load something once and use it again. Callbacks are not
    called meanwhile.
    """
    handler = trainer.callback_handler
    before = _PlainValues(trainer)
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback()], handler.model, handler.processing_class, handler.optimizer, handler.lr_scheduler
    )
    if getattr(trainer, "log_completions", False):  # TRL prints and uploads them whenever it logs
        trainer.log_completions = False
    try:
        yield
    finally:
        trainer.callback_handler = handler
        before.put_back()


class _PlainValues:
    """What is plain in an object, as it is now."""

    def __init__(self, thing: Any) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # with the objects themselves: an id may be used again after one is gone
        self._remember_attributes(thing)

    def put_back(self) -> None:
        """Put back what has changed since. Lists, dictionaries and tensors are changed in place."""
        for undo in self._undo:
            undo()

    def _remember_attributes(self, thing: Any) -> None:
        before = dict(vars(thing))
        self._undo.append(lambda: _set_attributes(thing, before))
        for name, value in before.items():
            if name not in _DATASETS:
                self._remember(value)

    def _remember(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, type):
            return
        kind = type(value)
        if kind in (*_MAPPINGS, *_SEQUENCES, set):
            self._keep(value)
        elif isinstance(value, tuple):
            self._seen[id(value)] = value
        else:
            self._remember_object(value)
            return
        if kind is not set:
            for content in list(value.values() if kind in _MAPPINGS else value):
                self._remember(content)

    def _remember_object(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.numel() <= _MOST_ELEMENTS and not value.is_inference():
                self._seen[id(value)] = value
                copied, version = value.detach().clone(), value._version
                self._undo.append(lambda: _fill(value, copied) if value._version != version else None)
        elif isinstance(value, GENERATOR):
            self._seen[id(value)] = value
            state = generator_state(value)
            self._undo.append(lambda: set_generator_state(value, state))
        elif dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
            self._seen[id(value)] = value
            self._remember_attributes(value)

    def _keep(self, value: Any) -> None:
        self._seen[id(value)], before = value, value.copy()

        def undo() -> None:
            if not _same(value, before):
                refill(value, before)

        self._undo.append(undo)


def _same(now: Any, before: Any) -> bool:
    """Whether a container holds the same objects as before, in the same order."""
    if isinstance(before, set):
        return bool(now == before)
    if isinstance(before, dict):
        return _same(list(now), list(before)) and _same(list(now.values()), list(before.values()))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _set_attributes(thing: Any, before: dict[str, Any]) -> None:
    """Give an object the attributes of before; those that are not plain now stay."""
    now = vars(thing)
    for name in [*now]:
        if name not in before and _is_plain(now[name]):
            del now[name]
    for name, value in before.items():
        if name not in now or (now[name] is not value and _is_plain(now[name])):
            now[name] = value


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _fill(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():  # not through ``detach``, which would leave a sparse tensor as it is
        tensor.copy_(values)
