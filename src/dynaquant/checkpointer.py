"""What a training loop talks to: save, due, restore, close."""

from __future__ import annotations

import logging
import math
import operator
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant import rng
from dynaquant import sources as state_sources
from dynaquant.coding.stream import StoredTensor, tensor_hash, values_of
from dynaquant.container import CheckpointFile
from dynaquant.errors import CheckpointError, StateError
from dynaquant.importance import GradientRecorder
from dynaquant.quantize.checkpoint import quantize_weights
from dynaquant.quantize.partition import Configuration
from dynaquant.quantized import QuantizedTensor
from dynaquant.record import Record, record_of
from dynaquant.retention import Retention, prune, release
from dynaquant.roles import labels, quantizable
from dynaquant.run import Base, Checkpoint, Run
from dynaquant.search.quality import Evaluate, measure
from dynaquant.state import flatten, unflatten

log = logging.getLogger("dynaquant")

GRADIENT_WINDOW = 50
"""Optimizer steps before a checkpoint whose gradients are recorded (method 1.1)."""


class Checkpointer:
    """Saves the whole state of a training into a run and restores it from there.

    folder: the run's; made when it is not there. model: the module whose weights are quantized. optimizer: optional.
    extras: anything else that must come back, by name: schedulers, scalers, loaders (whatever has ``state_dict()`` and
    ``load_state_dict()``), ``torch.Generator``s and ``numpy.random.Generator``s. Modules among them are stored exactly,
    unless ``roles`` says otherwise. The global random number generators are always part of the state.

    evaluate: a function of the model whose value is recorded before and after quantization; it leaves no trace on
    training. higher_is_better: the direction of its value. configuration: the quantizer's knobs. roles: overrides of
    what tensors are, by glob pattern, e.g. ``{"*.lm_head.weight": "exact"}``; patterns for the optimizer's state begin
    with ``"optimizer."``. every: steps between checkpoints, for ``due``. keep_last, keep_every: how many of the newest
    checkpoints stay, and of which steps every multiple stays; by default all do. keyframe_every: checkpoints in a chain
    of deltas at most, the keyframe included.

    Use as a context manager, or call ``close``. Raises StateError for objects that cannot be saved, CheckpointError
    when another process writes to the folder, ValueError for numbers out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extras: Mapping[str, Any] | None = None,
        evaluate: Evaluate | None = None,
        higher_is_better: bool = False,
        configuration: Configuration | None = None,
        roles: Mapping[str, str] | None = None,
        every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keyframe_every: int = 16,
    ) -> None:
        if (every is not None and every < 1) or keyframe_every < 1:
            raise ValueError(f"every and keyframe_every must be at least 1, not {every} and {keyframe_every}")
        if not isinstance(model, nn.Module):
            raise StateError(f"model must be a torch.nn.Module, not a {type(model).__qualname__}")
        reserved = {"model", "optimizer", *state_sources.RESERVED} & set(extras or {})
        if reserved:
            raise ValueError(f"extras cannot be called {' or '.join(sorted(reserved))}; those names are taken")
        self._model = model
        self._sources: dict[str, Any] = {"model": model}
        if optimizer is not None:
            self._sources["optimizer"] = optimizer
        self._sources.update(extras or {})
        state_sources.check(self._sources)
        self._evaluate, self._higher_is_better = evaluate, higher_is_better
        self._configuration = configuration or Configuration()
        self._roles = dict(roles or {})
        # Mistakes are found now rather than at the first save. The optimizer's state is not there yet.
        tensors = flatten(state_sources.collect(self._sources))[1]
        labels(tensors, self._sources, {p: r for p, r in self._roles.items() if not p.startswith("optimizer.")})
        self._every, self._keyframe_every = every, keyframe_every
        self._retention = Retention(keep_last, keep_every)
        self.skipped: list[CheckpointError] = []
        """Why ``restore`` passed over checkpoints."""
        self._damaged: set[int] = set()
        self._last_step: int | None = None
        self._base: Base | None = None
        # Quantized weights of the last checkpoint and the hashes of the values they were made of, by name: a tensor
        # that has not changed since is not quantized again, so that its values stay what they were.
        self._quantized: dict[str, tuple[str, QuantizedTensor]] = {}
        self._pending: Future[Record] | None = None
        self._closed = False
        self._run = Run(folder)
        with ExitStack() as stack:
            stack.enter_context(self._run.writer())
            self._recorder: GradientRecorder | None = None
            if isinstance(optimizer, torch.optim.Optimizer) and self._configuration.uses_sensitivity:
                parameters = {
                    f"model.{name}": parameter for name, parameter in model.named_parameters() if quantizable(parameter)
                }
                self._recorder = GradientRecorder(parameters, optimizer, GRADIENT_WINDOW, every)
                stack.callback(self._recorder.close)
            self._writer = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="dynaquant"))
            self._stack = stack.pop_all()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The error that ended training must not be replaced by that of a write.
        try:
            self.close()
        except Exception as write_error:
            log.warning("the last checkpoint could not be written: %s", write_error)

    def due(self, step: int) -> bool:
        """Whether ``step`` is the next multiple of ``every`` since the last checkpoint, or beyond it."""
        if self._every is None:
            raise ValueError("due() needs Checkpointer(…, every=steps)")
        last = self._last_step or 0
        return step >= (last // self._every + 1) * self._every

    def restore(self, step: int | None = None) -> int | None:
        """Puts the newest checkpoint that verifies (or that of ``step``) into the objects and returns its step.

        None when the run has no checkpoints. Checkpoints that are damaged are passed over; ``skipped`` and a logged
        warning say why. Nothing is changed unless everything fits. (Should an extra's own ``load_state_dict`` raise,
        extras before it are restored; model and optimizer come last and are as they were.)

        Raises CheckpointError when there are checkpoints but none verifies, or that of ``step`` doesn't; StateError
        when the checkpoint does not fit the objects.
        """
        self._check_open()
        self.wait()
        self.skipped = []
        if step is not None:
            return self._restore(self._run.file(step))
        summaries, broken = self._run.summaries()
        self.skipped = broken
        for summary in reversed(summaries):
            try:
                restored = self._restore(self._run.file(summary.step))
            except CheckpointError as error:
                self.skipped.append(error)
                self._damaged.add(summary.step)
                continue
            for reason in self.skipped:
                log.warning("restored step %d; passed over %s", restored, reason)
            return restored
        if not self.skipped:
            return None
        reasons = "\n  ".join(str(error) for error in self.skipped)
        raise CheckpointError(
            f"{self._run.folder}: no checkpoint of this run can be restored:\n  {reasons}\n"
            "Nothing was changed. To train from the beginning, use an empty folder."
        )

    def _restore(self, file: CheckpointFile) -> int:
        header = file.header
        tensors = self._run.load(file)
        state = _state_of(file, tensors)
        try:
            state_sources.check_fit(self._sources, state, f"{file.path} (step {header.step})")
            rng.check(state[state_sources.RNG])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file.path}: it holds no state of a training ({error!r})") from error
        state_sources.restore(self._sources, state)
        self._base = Base.loaded(header, tensors)
        self._quantized = {
            name: (self._base.hashes[name], stored)
            for name, stored in tensors.items()
            if isinstance(stored, QuantizedTensor)
        }
        self._last_step = header.step
        if self._recorder:
            self._recorder.forget()
        return header.step

    def save(self, step: int) -> Future[Record]:
        """Saves the state as the checkpoint of ``step`` (0 or more).

        Returns once the state is captured and, with ``evaluate``, scored; encoding, writing and verifying go on in
        the background. The returned future's ``result()`` waits for them and is the save's record.

        A checkpoint of the same step is replaced. Raises what went wrong in the previous save's background write;
        StateError for a state that cannot be stored; whatever ``evaluate`` raises.
        """
        self._check_open()
        if not hasattr(step, "__index__") or step < 0:
            raise ValueError(f"step must be an integer from 0 on, not {step!r}")
        step = operator.index(step)
        if self._last_step is None and (found := self._run.summaries()[0]):
            log.warning(
                "%s holds %d checkpoints, and none was restored: this save begins another line of training in it",
                self._run.folder,
                len(found),
            )
        start = time.perf_counter()
        self.wait()
        checkpoint = self._capture(step, {"wait": time.perf_counter() - start})
        self._last_step = step
        self._pending = self._writer.submit(self._write, checkpoint)
        return self._pending

    def _capture(self, step: int, seconds: dict[str, float]) -> Checkpoint:
        start = time.perf_counter()
        tree, tensors = flatten(state_sources.collect(self._sources))
        label_of = labels(tensors, self._sources, self._roles)
        gradients = self._recorder.collect() if self._recorder else {}
        weights = {name: tensor for name, tensor in tensors.items() if label_of[name].role == "weight"}
        hashes = {name: tensor_hash(tensor) for name, tensor in weights.items()}
        unchanged = {name: known for name, (digest, known) in self._quantized.items() if hashes.get(name) == digest}
        to_quantize = {name: tensor for name, tensor in weights.items() if name not in unchanged}
        seconds["capture"] = time.perf_counter() - start

        start = time.perf_counter()
        quantized, notes = quantize_weights(to_quantize, label_of, gradients, self._configuration)
        if "optimizer" in self._sources and self._configuration.uses_sensitivity and to_quantize and not gradients:
            notes.append("no gradients were recorded before this save: magnitude stood in for sensitivity")
        quantized.update(unchanged)
        seconds["quantize"] = time.perf_counter() - start

        quality = None
        if self._evaluate is not None:
            start = time.perf_counter()
            names = {f"model.{name}": name for name, _ in self._model.named_parameters()}
            values = {names[name]: values_of(stored) for name, stored in quantized.items() if name in names}
            measured = asdict(measure(self._model, values, self._evaluate, self._higher_is_better))
            quality = {key: value if math.isfinite(value) else repr(value) for key, value in measured.items()}
            if not all(map(math.isfinite, measured.values())):
                notes.append("the metric is not finite: what this checkpoint costs is unknown")
            seconds["evaluate"] = time.perf_counter() - start

        start = time.perf_counter()
        stored: dict[str, StoredTensor] = {
            name: quantized[name] if name in quantized else _copy(tensor) for name, tensor in tensors.items()
        }
        self._quantized = {name: (hashes[name], tensor) for name, tensor in quantized.items()}
        seconds["capture"] += time.perf_counter() - start
        record = {
            "configuration": asdict(self._configuration),
            "quality": quality,
            "seconds": seconds,
            "notes": notes,
        }
        return Checkpoint(step, tree, stored, label_of, record)

    def _write(self, checkpoint: Checkpoint) -> Record:
        start = time.perf_counter()
        base = self._base if self._base is not None and self._can_be_parent(self._base, checkpoint.step) else None
        notes: list[str] = []
        if self._run.path(checkpoint.step).exists():
            notes += release(self._run, [checkpoint.step])[1]
        _, self._base = self._run.commit(checkpoint, base)
        self._damaged.discard(checkpoint.step)
        try:
            notes += prune(self._run, self._retention, self._damaged)
        except Exception as error:
            error.add_note(f"step {checkpoint.step} is saved; clearing away older checkpoints failed")
            raise
        return record_of(self._run.file(checkpoint.step), {"write": time.perf_counter() - start}, notes)

    def _can_be_parent(self, base: Base, step: int) -> bool:
        """Whether ``step`` can be coded against ``base``: its chain is whole and short, and it is there to stay."""
        lengths = self._run.chain_lengths(self._damaged)
        steps = [summary.step for summary in self._run.summaries()[0] if summary.step != step] + [step]
        usable = {checkpoint.step for checkpoint in lengths} | {step}
        leaves = base.parent.step == step or base.parent.step in self._retention.superfluous(steps, usable)
        return lengths.get(base.parent, self._keyframe_every) < self._keyframe_every and not leaves

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._run.folder}: this Checkpointer has been closed; make another one")

    def wait(self) -> None:
        """Waits for the background write, if any, and raises what went wrong in it, once."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result()
        finally:
            if pending.done():  # not when a signal has ended the waiting
                self._pending = None

    def records(self) -> list[Record]:
        """The records of the run's checkpoints, in the order of their commits."""
        self.wait()
        return [record_of(self._run.file(summary.step)) for summary in self._run.summaries()[0]]

    def close(self) -> None:
        """Waits for the last write, raises what went wrong in it, and lets the run go. Safe to call twice."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._stack.close()


def _copy(tensor: Tensor) -> Tensor:
    """A host copy that training cannot change any more."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def load(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The state stored in a run's newest checkpoint, or in that of ``step``, as plain dictionaries and CPU tensors.

    Keys are ``"model"``, ``"optimizer"``, the names of the extras, ``"rng"``, ``"classes"`` and ``"parameters"``.
    Raises CheckpointError when the checkpoint is not there or damaged.
    """
    run = Run(folder)
    if step is None:
        summaries, broken = run.summaries()
        if not summaries:
            raise broken[0] if broken else CheckpointError(f"{folder}: there are no checkpoints here")
        step = summaries[-1].step
    file = run.file(step)
    tensors = run.load(file)
    return _state_of(file, tensors)


def _state_of(file: CheckpointFile, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    try:
        state = unflatten(file.header.tree, {name: values_of(stored) for name, stored in tensors.items()})
    except StateError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    if not isinstance(state, dict) or not set(state_sources.RESERVED) <= set(state):
        raise CheckpointError(f"{file.path}: it holds no state of a training")
    return state
