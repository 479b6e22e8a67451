"""What a training loop talks to: save, due, restore, close."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from dynaquant.errors import CheckpointError
from dynaquant.quantize.knobs import Knobs, Method
from dynaquant.restore.restorer import Restorer
from dynaquant.save.background import BackgroundWriter, check_process
from dynaquant.save.compressor import Allowance, Compressed, Compressor
from dynaquant.save.log_to import LogTo, logger_of
from dynaquant.save.presets import QualityName
from dynaquant.save.record import Record, json_of, record_of, record_without_file
from dynaquant.save.schedule import Every, Schedule
from dynaquant.save.turn import Turn
from dynaquant.search.quality import Evaluate, of_several
from dynaquant.state.flatten import flatten
from dynaquant.state.roles import Label, labels
from dynaquant.state.tree import without_tensors
from dynaquant.store.container import is_step
from dynaquant.store.retention import Retention, can_be_parent, make_way, prune
from dynaquant.store.run import Run
from dynaquant.store.writing import Base, Checkpoint
from dynaquant.training import supported
from dynaquant.training.collect import collect, rank_rng_state
from dynaquant.training.objects import models_of, objects_of
from dynaquant.training.ranks import Group
from dynaquant.training.snapshot import Snapshot

log = logging.getLogger("dynaquant")
T = TypeVar("T")

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer]

TYPICAL_TRIALS = 3
"""Candidates that a save scores once the search has settled; what an automatic schedule reckons with."""


class Checkpointer:
    """Saves the whole state of a training into a run and restores it from there.

    folder: the run's; made when it is not there. model: the module whose weights are quantized; several by name.
    optimizer: optional; several by name or in a sequence. extras: anything else that must come back, by name:
    schedulers, scalers, loaders (whatever has ``state_dict()`` and ``load_state_dict()``), ``torch.Generator``s and
    ``numpy.random.Generator``s, and dictionaries, lists and dataclasses, which are updated in place. Modules among them
    are stored exactly, unless ``roles`` says otherwise. The global random number generators are always part of the
    state. Names are those of the bare model: model and optimizer may be wrapped (DistributedDataParallel,
    ``torch.compile``, Accelerate, …).

    evaluate: a function of the bare model (of a dictionary of them, if several are given), or
    ``LossOn(batches, loss_fn)``; it leaves no trace on training. At every save
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
    ``add_scalar``), or a function of the ``Record``. It is called from the thread that writes, where ``records`` may be
    called; should it raise, a warning says so, and the checkpoint is there all the same.

    Where ``torch.distributed`` is initialised, all ranks are taken for replicas of one model: every rank makes a
    Checkpointer for the same folder, and calls ``restore`` and ``save`` at the same steps. They share the work of the
    search, and rank 0 writes. Random number generators are stored for each rank, everything else as it is on rank 0.

    ``save``, ``restore`` and ``close`` raise RuntimeError while one of them goes on (called by ``evaluate``, or from
    another thread), in the thread that writes, and, but for ``close``, in a forked child.

    Use as a context manager, or call ``close``. Raises StateError for objects that cannot be saved, CheckpointError
    when another process writes to the folder, ValueError for numbers out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizers | None = None,
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
        loss = Allowance(quality, method, max_degradation, configuration)
        if exact not in (None, "latest"):
            raise ValueError(f'exact must be "latest" or None, not {exact!r}; for all, quality="lossless"')
        if evaluate is not None and not callable(evaluate):
            raise TypeError(f"evaluate must be a function of the model, not {evaluate!r}")
        self._objects = objects_of(model, optimizer, extras or {})
        supported.check(self._objects)
        self._schedule = Schedule(every, max_overhead, mean_time_between_failures)
        self._retention = Retention(keep_last, keep_every)
        self._group = Group()
        self._roles = dict(roles or {})
        self._keyframe_every = keyframe_every
        self._log_to = None if log_to is None else logger_of(log_to)
        self.skipped: list[CheckpointError] = []
        """Why ``restore`` passed over checkpoints."""
        self.not_restored: list[str] = []
        """What the last ``restore(strict=False)`` left out, and why."""
        self._damaged: set[int] = set()
        self._has_line = False  # whether a checkpoint was saved or restored
        self._base: Base | None = None
        self._turn = Turn()
        self._closed = False
        self._run = Run(folder)
        with ExitStack() as undo:
            hold = undo.enter_context(ExitStack())  # on the run; the writer's thread lets go of it
            self._group.run_on_all_ranks(
                lambda: hold.enter_context(self._run.writer()) if self._group.rank == 0 else None
            )
            self._compressor = Compressor(
                self._objects,
                self._roles,
                evaluate if evaluate is None or isinstance(model, nn.Module) else of_several(evaluate),
                higher_is_better,
                loss,
                exact == "latest",
                self._group,
                self._schedule.interval,
            )
            undo.callback(self._compressor.close)
            self._end_first_step_check = supported.check_after_first_step(self._objects)
            undo.callback(self._end_first_step_check)
            # Mistakes are found now rather than at the first save. The optimizer's state is not there yet.
            early = {p: r for p, r in self._roles.items() if not p.startswith("optimizer.")}
            tensors = self._group.run_on_all_ranks(lambda: flatten(collect(self._objects))[1])
            supported.check_replicas(tensors, self._group)
            labels(tensors, self._objects, early, self._compressor.vectors)
            supported.warn_of_unsaved(self._objects, tensors.values())
            self._writer = BackgroundWriter[Record](self, hold.close)
            undo.pop_all()

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

    def restore(
        self, step: int | str | None = None, *, only: str | Collection[str] | None = None, strict: bool = True
    ) -> int | None:
        """Puts the newest checkpoint that verifies (or that of a step or a tag) into the objects and returns its step.

        None when the run has no checkpoints. Checkpoints that are damaged are passed over; ``skipped`` and a logged
        warning say why. Everything is checked before anything is changed, and nothing is changed unless everything
        fits. Should an extra's own ``load_state_dict`` raise, all is put back as it was. The tensors of the model and
        the optimizer are filled where they are in memory, if what was stored fits there.

        only: what to restore, e.g. ``"model"`` or ``("model", "optimizer")``: names of objects, and ``"rng"`` for the
        global random number generators; the rest stays as it is. strict: False leaves out what does not fit, such as a
        new head or another optimizer; ``not_restored`` and logged warnings list it.

        Raises CheckpointError when there are checkpoints but none verifies, or that of ``step`` doesn't; StateError
        when the checkpoint does not fit the objects; ValueError for a name in ``only`` that does not occur. When it is
        interrupted, the objects may be restored in part: restore again.
        """
        return self._alone("restore", lambda: self._restore(step, only, strict))

    def _restore(self, step: int | str | None, only: str | Collection[str] | None, strict: bool) -> int | None:
        self._check_open()
        hashes = self._compressor.hashes
        restorer = Restorer(self._run, self._objects, self._group, hashes, only, strict, damaged=self._damaged)
        self._group.run_on_all_ranks(self.wait)
        self.skipped, self.not_restored = restorer.skipped, []
        loaded = restorer.restore(step)
        if loaded is None:
            return None
        self.not_restored = list(loaded.problems)
        header = loaded.file.header
        self._base = Base.loaded(header, loaded.tensors)
        self._has_line = True
        self._compressor.resume(
            header, {n: t for n, t in loaded.tensors.items() if n in loaded.taken}, loaded.from_lossless_copy
        )
        self._schedule.begin(header.step, header.record.get("interval"))
        self._compressor.expect(self._schedule.interval)
        return loaded.step

    def save(self, step: int) -> Future[Record]:
        """Saves the state as the checkpoint of ``step`` (0 to 2**63 - 1).

        Returns once the state is captured and its configuration found; encoding, writing and verifying go on in the
        background. The returned future's ``result()`` waits for them and is the save's record.

        A checkpoint of the same step is replaced. Raises what went wrong in the previous save's background write;
        StateError for a state that cannot be stored. Raises EvaluateError when ``evaluate`` raises or returns no number
        before it has ever worked, and under ``torch.distributed`` whenever it does so, on all ranks; otherwise the
        weights are stored exactly, which a warning and the record say. When memory runs out in ``evaluate``, or the
        device fails, that error is raised as it is.

        Whatever it raises, KeyboardInterrupt and what a signal handler raises included, training is as if it had not
        been called, and the checkpoint is saved whole or not at all.
        """
        return self._alone("save", lambda: self._save(step))

    def _save(self, step: int) -> Future[Record]:
        self._check_open()
        if not hasattr(step, "__index__") or step < 0:
            raise ValueError(f"step must be an integer from 0 on, not {step!r}")
        step = operator.index(step)
        if not is_step(step):
            raise ValueError("step must be less than 2**63, which is what a checkpoint file has room for")
        schedule = copy(self._schedule)  # a save that ends early has not been
        schedule.saving(step)
        start = time.perf_counter()
        self._group.run_on_all_ranks(self._prepare)
        seconds = {"wait": time.perf_counter() - start}
        tree, compressed = self._capture(seconds)
        decision = compressed.decision
        evaluations = sum(trial.degradation is not None for trial in decision.trials)
        share = min(1.0, TYPICAL_TRIALS / max(evaluations, 1))
        schedule.saved(seconds["wait"] + seconds["capture"] + share * seconds["search"])
        schedule.interval = self._group.from_rank_0(schedule.interval)
        record = json_of(decision, self._compressor.manager.history, schedule.interval, seconds, compressed.notes)
        saving: Future[Record]
        if self._group.rank == 0:
            checkpoint = Checkpoint(
                step,
                tree,
                compressed.tensors,
                compressed.labels,
                record,
                coder=self._compressor.coder,
                lossless_copy=compressed.lossless_copy,
                frozen=compressed.frozen,
            )
            saving = self._writer.hand_over(partial(self._write, checkpoint, decision.predicted))
        else:
            saving = Future()
            saving.set_result(record_without_file(step, record))
        self._schedule = schedule
        self._has_line = True
        self._compressor.saved(compressed, schedule.interval)
        return saving

    def _prepare(self) -> None:
        self.wait()
        if not self._has_line and self._group.rank == 0 and (found := self._run.summaries()[0]):
            log.warning(
                "%s holds %d checkpoints, and none was restored: this save begins another line of training in it",
                self._run.folder,
                len(found),
            )

    def _capture(self, seconds: dict[str, float]) -> tuple[Any, Compressed]:
        """The tree of the state, and its tensors as they are to be stored. Training is as before."""
        start = time.perf_counter()
        others = self._group.all_gather(rank_rng_state(self._objects) if self._group.rank else None)[1:]
        tree, tensors, label_of = self._group.run_on_all_ranks(
            lambda: self._collect([other for other in others if other])
        )
        omitted = {name for name, label in label_of.items() if label.role == "omit"}
        tree = without_tensors(tree, omitted) if omitted else tree
        hashes = {} if self._base is None else self._base.hashes
        held = {} if self._base is None else self._run.frozen.held(self._base.tensors)
        seconds.update(capture=time.perf_counter() - start, search=0.0)
        before = Snapshot(models_of(self._objects), self._objects)
        try:
            compressed = self._compressor.compress(tensors, label_of, hashes, held, seconds)
            self._group.run_on_all_ranks(self._turn.check)
        finally:
            try:
                before.put_back()
            except BaseException:  # a signal came just then
                before.put_back()
                raise
        return tree, compressed

    def _collect(self, other_ranks: list[dict[str, Any]]) -> tuple[Any, dict[str, Tensor], dict[str, Label]]:
        tree, tensors = flatten(collect(self._objects, other_ranks))
        return tree, tensors, labels(tensors, self._objects, self._roles, self._compressor.vectors)

    def _write(self, checkpoint: Checkpoint, predicted: float | None) -> Record:
        start = time.perf_counter()
        base, step = self._base, checkpoint.step
        if base is not None and not can_be_parent(
            self._run, base, step, self._retention, self._keyframe_every, self._damaged
        ):
            base = None
        notes: list[str] = []
        if self._run.path(step).exists():
            notes += make_way(self._run, step)
        file, self._base = self._run.commit(checkpoint, base)
        self._damaged.discard(step)
        try:
            notes += prune(self._run, self._retention, self._damaged)
        except Exception as error:
            error.add_note(f"step {step} is saved; clearing away older checkpoints failed")
            raise
        record = record_of(file, {"write": time.perf_counter() - start}, notes)
        if not record.keyframe and "weight" in record.roles:
            self._compressor.manager.learn_size(predicted, record.roles["weight"].stored)
        if self._log_to is not None:
            try:
                self._log_to(record)
            except Exception as error:
                log.warning("step %d is saved, but log_to failed: %r", step, error)
        return record

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._run.folder}: this Checkpointer has been closed; make another one")

    def _alone(self, name: str, action: Callable[[], T]) -> T:
        """The action's result, while no other call of this Checkpointer goes on."""
        check_process(self._writer.process)
        if self._writer.is_here:
            raise RuntimeError(f"{name} was called in the thread that writes (by log_to?): call it in the training's")
        return self._turn.take(name, action)

    def wait(self) -> None:
        """Waits for the background write, if any, and raises what went wrong in it, once.

        In the thread that writes, where ``log_to`` is called, there is nothing to wait for.
        """
        self._writer.wait()

    def records(self) -> list[Record]:
        """The records of the run's checkpoints, in the order of their commits."""
        self.wait()
        return [record_of(file) for file in self._run.files()[0]]

    def close(self) -> None:
        """Waits for the last write, raises what went wrong in it, and lets the run go. Safe to call twice.

        When the waiting is interrupted, the write still goes on, and then lets the run go. In a forked child it does
        neither: both are the parent's.
        """
        if os.getpid() != self._writer.process:  # the run, and what is being written, are the parent's
            self._close(lambda: None)
        else:
            self._alone("close", lambda: self._close(self._writer.close))

    def _close(self, close_writer: Callable[[], None]) -> None:
        self._closed = True
        try:
            close_writer()
        finally:
            self._end_first_step_check()
            self._compressor.close()
