"""What a training loop talks to: save, due, restore, close."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dynaquant import rng
from dynaquant import sources as state_sources
from dynaquant.coding.stream import StoredTensor
from dynaquant.compressor import Compressor, Loss
from dynaquant.container import CheckpointFile
from dynaquant.distributed import Group, unwrapped
from dynaquant.encoding import Base, Checkpoint
from dynaquant.errors import CheckpointError, StateError
from dynaquant.live import LogTo, logger_of
from dynaquant.loading import exact_of, state_of
from dynaquant.places import already_there, fill, new, places
from dynaquant.presets import QualityName
from dynaquant.quantize.knobs import Knobs, Method
from dynaquant.record import Record, json_of, record_of, record_without_file
from dynaquant.retention import Retention, make_way, prune
from dynaquant.roles import Label, labels
from dynaquant.run import Run
from dynaquant.schedule import Every, Schedule
from dynaquant.search.manager import Decision
from dynaquant.search.quality import Evaluate
from dynaquant.state import flatten, without
from dynaquant.tags import file_of

log = logging.getLogger("dynaquant")

TYPICAL_TRIALS = 3
"""Candidates that a save scores once the search has settled; what an automatic schedule reckons with."""


@dataclass(frozen=True)
class _Loaded:
    """A checkpoint that was decoded and fits.

    tensors: as its file has them. state: the tensors of the model and the optimizer are their own where they can be
    filled; fills: these, and what with. exact: whether the state is as it was before it was quantized.
    """

    file: CheckpointFile
    tensors: Mapping[str, StoredTensor]
    state: Mapping[str, Any]
    fills: Sequence[tuple[Tensor, StoredTensor]]
    exact: bool

    @property
    def step(self) -> int:
        return self.file.header.step


class Checkpointer:
    """Saves the whole state of a training into a run and restores it from there.

    folder: the run's; made when it is not there. model: the module whose weights are quantized. optimizer: optional.
    extras: anything else that must come back, by name: schedulers, scalers, loaders (whatever has ``state_dict()`` and
    ``load_state_dict()``), ``torch.Generator``s and ``numpy.random.Generator``s. Modules among them are stored exactly,
    unless ``roles`` says otherwise. The global random number generators are always part of the state.

    evaluate: a function of the model, or ``LossOn(batches, loss_fn)``; it leaves no trace on training. At every save
    the most compact configuration is searched for whose metric is worse by at most max_degradation, as a fraction of
    the metric of the weights in training. higher_is_better: the direction of the metric. Without ``evaluate`` an
    estimate from the weights' movement stands in for it.

    quality: how much may be lost. ``"lossless"``: nothing; ``"high"``, ``"balanced"``, ``"small"``: a max_degradation
    of 0.001, 0.01 or 0.05 (or what is given), and moments as coarse as goes with it (``presets``). method: ``"grid"``,
    or ``"published"`` for the system of the paper, which leaves moments exact; ``"kmeans"`` is that with the coder of
    ``"grid"``. configuration: the quantizer's knobs, if they are not to be searched for; a metric is then only
    recorded. It decides on the method.

    exact: ``"latest"`` keeps the newest checkpoint as it was, too, beside its small form; ``restore`` prefers that.

    roles: overrides of what tensors are, by glob pattern, e.g. ``{"*.lm_head.weight": "exact"}``; patterns for the
    optimizer's state begin with ``"optimizer."``. every: steps between checkpoints, for ``due``; ``"auto"``: from the
    measured cost of a save, so that saving takes at most the share max_overhead (0.005 unless given) of the time of
    training, or as is best for a mean_time_between_failures, in seconds. keep_last, keep_every: how many of the newest
    checkpoints stay, and of which steps every multiple stays; by default all do. keyframe_every: checkpoints in a chain
    of deltas at most, the keyframe included.

    log_to: is told of every save once it is on the disk: a TensorBoard ``SummaryWriter`` (or whatever has its
    ``add_scalar``), or a function of the ``Record``. It is called from the thread that writes; should it raise, a
    warning says so, and the checkpoint is there all the same.

    Where ``torch.distributed`` is initialised, all ranks are taken for replicas of one model: every rank makes a
    Checkpointer for the same folder, and calls ``restore`` and ``save`` at the same steps. They share the work of the
    search, and rank 0 writes. ``model`` may be wrapped in DistributedDataParallel. Random number generators are stored
    for each rank, everything else as it is on rank 0.

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
        max_degradation: float | None = None,
        quality: QualityName = "balanced",
        method: Method | None = None,
        configuration: Knobs | None = None,
        exact: Literal["latest"] | None = None,
        roles: Mapping[str, str] | None = None,
        every: Every | None = None,
        max_overhead: float | None = None,
        mean_time_between_failures: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keyframe_every: int = 16,
        log_to: LogTo | None = None,
    ) -> None:
        if keyframe_every < 1:
            raise ValueError(f"keyframe_every must be at least 1, not {keyframe_every}")
        loss = Loss(quality, method, max_degradation, configuration)
        if exact not in (None, "latest"):
            raise ValueError(f'exact must be "latest" or None, not {exact!r}; for all, quality="lossless"')
        if not isinstance(model, nn.Module):
            raise StateError(f"model must be a torch.nn.Module, not a {type(model).__qualname__}")
        if extras is not None and not isinstance(extras, Mapping):
            raise TypeError(f"extras must be a dictionary of objects by name, not a {type(extras).__qualname__}")
        if evaluate is not None and not callable(evaluate):
            raise TypeError(f"evaluate must be a function of the model, not {evaluate!r}")
        reserved = {"model", "optimizer", *state_sources.RESERVED} & set(extras or {})
        if reserved:
            raise ValueError(f"extras cannot be called {' or '.join(sorted(reserved))}; those names are taken")
        self._schedule = Schedule(every, max_overhead, mean_time_between_failures)
        self._retention = Retention(keep_last, keep_every)
        self._group = Group()
        model = unwrapped(model)
        self._sources: dict[str, Any] = {"model": model}
        if optimizer is not None:
            self._sources["optimizer"] = optimizer
        self._sources.update(extras or {})
        state_sources.check(self._sources)
        self._roles = dict(roles or {})
        self._keyframe_every = keyframe_every
        self._log_to = None if log_to is None else logger_of(log_to)
        self.skipped: list[CheckpointError] = []
        """Why ``restore`` passed over checkpoints."""
        self._damaged: set[int] = set()
        self._has_line = False  # whether a checkpoint was saved or restored
        self._base: Base | None = None
        self._pending: Future[Record] | None = None
        self._closed = False
        self._run = Run(folder)
        with ExitStack() as stack:
            self._group.together(lambda: stack.enter_context(self._run.writer()) if self._group.rank == 0 else None)
            self._compressor = Compressor(
                self._sources,
                self._roles,
                evaluate,
                higher_is_better,
                loss,
                exact == "latest",
                self._group,
                self._schedule.interval,
            )
            stack.callback(self._compressor.close)
            # Mistakes are found now rather than at the first save. The optimizer's state is not there yet.
            early = {p: r for p, r in self._roles.items() if not p.startswith("optimizer.")}
            tensors = flatten(state_sources.collect(self._sources))[1]
            labels(tensors, self._sources, early, self._compressor.vectors)
            for name in state_sources.left_out(self._sources, tensors.values()):
                log.warning(
                    "%s works on tensors that are in no state to be saved, so they would not be restored; give what "
                    "holds them as an extra, e.g. extras={'masters': torch.nn.ParameterList(masters)}",
                    name,
                )
            self._writer = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="dynaquant"))
            self._stack = stack.pop_all()

    @property
    def max_degradation(self) -> float:
        """The largest relative loss of quality that one checkpoint may cause. May be changed at any time."""
        return self._compressor.max_degradation

    @max_degradation.setter
    def max_degradation(self, value: float) -> None:
        self._compressor.max_degradation = value

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
        """Whether a checkpoint is due: ``step`` is the next multiple of ``every`` since the last one, or beyond it.

        With ``every="auto"``: whether as many steps have passed as the cost of the last save asks for.
        """
        return self._schedule.due(step)

    def restore(self, step: int | str | None = None) -> int | None:
        """Puts the newest checkpoint that verifies (or that of a step or a tag) into the objects and returns its step.

        None when the run has no checkpoints. Checkpoints that are damaged are passed over; ``skipped`` and a logged
        warning say why. Nothing is changed unless everything fits. (Should an extra's own ``load_state_dict`` raise,
        extras before it are restored; model and optimizer come last and are as they were.) The tensors of both are
        filled where they are in memory, if what was stored fits there.

        Raises CheckpointError when there are checkpoints but none verifies, or that of ``step`` doesn't; StateError
        when the checkpoint does not fit the objects.
        """
        self._check_open()
        self._group.together(self.wait)
        # Rank 0 finds out which checkpoint it is, and the others take the same one. Nothing is changed anywhere before
        # it fits everywhere.
        first = self._group.rank == 0
        loaded = self._group.together(lambda: self._load_newest(step) if first else None)
        found = self._group.gather(loaded.step if loaded else None)[0]
        if found is None:
            return None
        loaded = self._group.together(lambda: loaded or self._load_fitting(self._run.file(found)))
        self._group.together(lambda: self._put(loaded))
        return found

    def _load_newest(self, step: int | str | None) -> _Loaded | None:
        self.skipped = []
        if step is not None:
            return self._load_fitting(file_of(self._run, step))
        summaries, broken = self._run.summaries()
        self.skipped = broken
        for summary in reversed(summaries):
            try:
                loaded = self._load_fitting(self._run.file(summary.step))
            except CheckpointError as error:
                self.skipped.append(error)
                self._damaged.add(summary.step)
                continue
            for reason in self.skipped:
                log.warning("restored step %d; passed over %s", loaded.step, reason)
            return loaded
        if not self.skipped:
            return None
        reasons = "\n  ".join(str(error) for error in self.skipped)
        raise CheckpointError(
            f"{self._run.folder}: no checkpoint of this run can be restored:\n  {reasons}\n"
            "Nothing was changed. To train from the beginning, use an empty folder."
        )

    def _load_fitting(self, file: CheckpointFile) -> _Loaded:
        """A checkpoint that fits the objects to restore."""
        tensors = self._run.load(file)
        source, stored = exact_of(self._run, file, self.skipped) or (file, tensors)
        now = state_sources.collect_to_compare(self._sources)  # outside: an object's own error is no damage of a file
        try:
            there = already_there(now, stored, self._compressor.hashes)
            omitted = {entry.name for entry in source.header.entries if entry.omitted}
            own_memory = places(now, source.header.tree, {n: s for n, s in stored.items() if n not in there})
            values = {n: own_memory[n] if n in own_memory else new(stored[n]) for n in stored.keys() - there - omitted}
            state = state_of(source, {**values, **there})
            state_sources.fill_in_omitted(now, state, omitted)
            if not set(state_sources.RESERVED) <= set(state):
                raise KeyError(*set(state_sources.RESERVED) - set(state))
            changed = omitted - there.keys()
            state_sources.check_fit(self._sources, now, state, f"{file.path} (step {file.header.step})", changed)
            own = state_sources.randomness_of(state, self._group.rank)
            if own is not None:
                rng.check(own)
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file.path}: it holds no state of a training ({error!r})") from error
        if own is None:
            log.warning("%s was saved by fewer ranks: rank %d keeps its random numbers", file.path, self._group.rank)
        fills = [(place, stored[name]) for name, place in own_memory.items()]
        return _Loaded(file, tensors, state, fills, source is not file)

    def _put(self, loaded: _Loaded) -> None:
        header = loaded.file.header
        state_sources.restore(self._sources, loaded.state, self._group.rank, lambda: fill(loaded.fills))
        self._base = Base.loaded(header, loaded.tensors)
        self._has_line = True
        self._compressor.resume(header, loaded.tensors, loaded.exact)
        self._schedule.begin(header.step, header.record.get("interval"))
        self._compressor.expect(self._schedule.interval)

    def save(self, step: int) -> Future[Record]:
        """Saves the state as the checkpoint of ``step`` (0 or more).

        Returns once the state is captured and its configuration found; encoding, writing and verifying go on in the
        background. The returned future's ``result()`` waits for them and is the save's record.

        A checkpoint of the same step is replaced. Raises what went wrong in the previous save's background write;
        StateError for a state that cannot be stored. When ``evaluate`` raises, the weights are stored exactly, which
        the record notes; but under ``torch.distributed`` EvaluateError is raised on all ranks.
        """
        self._check_open()
        if not hasattr(step, "__index__") or step < 0:
            raise ValueError(f"step must be an integer from 0 on, not {step!r}")
        step = operator.index(step)
        self._schedule.saving(step)
        start = time.perf_counter()
        self._group.together(self._prepare)
        seconds = {"wait": time.perf_counter() - start}
        checkpoint, decision, notes = self._capture(step, seconds)
        self._has_line = True
        evaluations = sum(trial.degradation is not None for trial in decision.trials)
        share = min(1.0, TYPICAL_TRIALS / max(evaluations, 1))
        self._schedule.saved(seconds["wait"] + seconds["capture"] + share * seconds["search"])
        self._schedule.interval = self._group.gather(self._schedule.interval)[0]
        self._compressor.expect(self._schedule.interval)
        checkpoint.record.update(
            json_of(decision, self._compressor.manager.history, self._schedule.interval, seconds, notes)
        )
        if self._group.rank == 0:
            self._pending = self._writer.submit(self._write, checkpoint, decision.predicted)
            return self._pending
        elsewhere: Future[Record] = Future()
        elsewhere.set_result(record_without_file(step, checkpoint.record))
        return elsewhere

    def _prepare(self) -> None:
        if not self._has_line and self._group.rank == 0 and (found := self._run.summaries()[0]):
            log.warning(
                "%s holds %d checkpoints, and none was restored: this save begins another line of training in it",
                self._run.folder,
                len(found),
            )
        self.wait()

    def _capture(self, step: int, seconds: dict[str, float]) -> tuple[Checkpoint, Decision, list[str]]:
        start = time.perf_counter()
        others = self._group.gather(state_sources.randomness(self._sources) if self._group.rank else None)[1:]
        tree, tensors, label_of = self._group.together(lambda: self._collect([other for other in others if other]))
        omitted = {name for name, label in label_of.items() if label.role == "omit"}
        tree = without(tree, omitted) if omitted else tree
        generators = state_sources.generators(self._sources)
        seconds.update(capture=time.perf_counter() - start, search=0.0)
        before, held = ({}, {}) if self._base is None else (self._base.hashes, self._run.held(self._base.tensors))
        compressed = self._compressor.compress(tensors, label_of, before, held, seconds)
        state_sources.set_generators(self._sources, generators)  # ``evaluate`` may have drawn from them
        checkpoint = Checkpoint(
            step,
            tree,
            compressed.tensors,
            compressed.labels,
            coder=self._compressor.coder,
            exact=compressed.exact,
            frozen=compressed.frozen,
        )
        return checkpoint, compressed.decision, compressed.notes

    def _collect(self, other_ranks: list[dict[str, Any]]) -> tuple[Any, dict[str, Tensor], dict[str, Label]]:
        tree, tensors = flatten(state_sources.collect(self._sources, other_ranks))
        return tree, tensors, labels(tensors, self._sources, self._roles, self._compressor.vectors)

    def _write(self, checkpoint: Checkpoint, predicted: float | None) -> Record:
        start = time.perf_counter()
        base = self._base if self._base is not None and self._can_be_parent(self._base, checkpoint.step) else None
        notes: list[str] = []
        if self._run.path(checkpoint.step).exists():
            notes += make_way(self._run, checkpoint.step)
        file, self._base = self._run.commit(checkpoint, base)
        self._damaged.discard(checkpoint.step)
        try:
            notes += prune(self._run, self._retention, self._damaged)
        except Exception as error:
            error.add_note(f"step {checkpoint.step} is saved; clearing away older checkpoints failed")
            raise
        record = record_of(file, {"write": time.perf_counter() - start}, notes)
        if not record.keyframe and "weight" in record.roles:
            self._compressor.manager.learn_size(predicted, record.roles["weight"].stored)
        if self._log_to is not None:
            try:
                self._log_to(record)
            except Exception as error:
                log.warning("step %d is saved, but log_to failed: %r", checkpoint.step, error)
        return record

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
