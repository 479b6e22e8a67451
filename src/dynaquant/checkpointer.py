"""``Checkpointer``, the class that a training loop uses.

Its methods check that a call is allowed and its arguments are valid. The work is in ``saving/`` and ``restore/``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from dynaquant.engine.bound import Bound
from dynaquant.errors import CheckpointError
from dynaquant.options import Deprecated, Every, Keep, Moved, Quality, QualityName, options_of
from dynaquant.ranks.dtensors import reshard
from dynaquant.ranks.group import Group
from dynaquant.restore.restorer import Restorer
from dynaquant.saving.arguments import check_first_state, check_for_shards, check_metric, checked_step
from dynaquant.saving.background import check_process
from dynaquant.saving.commit_stage import CommitStage
from dynaquant.saving.compressor import Compressor
from dynaquant.saving.division import check_sharded_before, holds_shards, replicas_of
from dynaquant.saving.judged_averages import AverageJudge
from dynaquant.saving.log_to import LogTo, logger_of
from dynaquant.saving.memory import Memory
from dynaquant.saving.movement import Movement
from dynaquant.saving.rank_zero import hold_for_writing
from dynaquant.saving.record import Record, record_of
from dynaquant.saving.saver import Saver
from dynaquant.saving.schedule import Schedule
from dynaquant.saving.training_source import TrainingSource
from dynaquant.saving.turn import Turn
from dynaquant.search.evaluation import Evaluate, of_several
from dynaquant.search.live_model import LiveModel
from dynaquant.search.metric import UserMetric
from dynaquant.store.commit import WritableRun
from dynaquant.store.retention import Retention
from dynaquant.store.tags import set_tag
from dynaquant.training import supported
from dynaquant.training.moment_correction import MomentCorrections
from dynaquant.training.objects import buffers_of_rank_0, models_of, objects_of, optimizers_of

log = logging.getLogger("dynaquant")
T = TypeVar("T")

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer]
"""One optimizer, several by name, or several in a sequence."""


class Checkpointer:
    """Saves the whole state of a training to a run, and restores it from there.

    A run is a folder with the checkpoints of one training. Use a ``Checkpointer`` as a context manager, or call
    ``close`` at the end:

        with dq.Checkpointer("runs/gpt", model, optimizer, evaluate=validation_loss, every=500) as ckpt:
            start = ckpt.restore() or 0
            for step in range(start + 1, steps + 1):
                train_one_step()
                if ckpt.due(step):
                    ckpt.save(step)

    - ``folder``: the folder of the run. It is created if it does not exist.
    - ``model``, ``optimizer``: a module whose weights are quantized, or a dictionary of several by name; an optimizer,
      or a dictionary or a sequence of several. They may be wrapped (DistributedDataParallel, ``torch.compile``,
      Accelerate, …).
    - ``extras``: other objects to save, by name: with ``state_dict()`` and ``load_state_dict()`` (schedulers, scalers,
      loaders, modules), ``torch.Generator``, ``numpy.random.Generator``, dictionaries, lists or dataclasses. Their
      tensors are stored exactly, but for moments of optimizers and averages of weights. The global random number
      generators are always saved.
    - ``evaluate``: a metric of the model, called with the bare model or the dictionary of models. It returns a number;
      ``LossOn(batches, loss_fn)`` makes such a function. Every save searches for the most compact configuration that is
      good enough by it. It runs under ``torch.no_grad()``, and does not affect training: parameters, buffers, training
      modes and random number generators are put back. Without a metric, an estimate from the weights' changes decides.
    - ``evaluate_average``: metrics of averages of weights among the extras, by the extra's name, called with the extra.
      An average is stored more finely where it would lose more than the weights may. Not for a sharded model.
    - ``higher_is_better``: whether a higher metric is better. By default, lower is better.
    - ``quality``: how much quality may be lost: ``"lossless"``, ``"high"``, ``"balanced"``, ``"small"`` or a
      ``Quality``.
    - ``roles``: roles of tensors, by glob pattern over their names, e.g. ``{"*.lm_head.weight": "exact"}``. If several
      patterns match, the last one counts. A ``Bound`` in place of a role limits the error of every value.
    - ``every``: when ``due`` says that a checkpoint is due: a number of steps between checkpoints, ``Auto()`` (as often
      as the cost of a save allows) or ``Moved(0.02)`` (once the weights have moved by 2 %).
    - ``keep``: which checkpoints to keep, e.g. ``Keep(last=3, every=1000)``. By default, all are kept.
    - ``log_to``: a function of the ``Record``, or a TensorBoard ``SummaryWriter`` (or another object with
      ``add_scalar``). It is called after every commit, in the writing thread. An error in it is logged as a warning.
    - ``deprecated``: options by the names that they had before (``Deprecated``).

    Several ranks: if ``torch.distributed`` is initialised, every rank makes a ``Checkpointer`` for the same folder, and
    calls ``save``, ``restore`` and ``close`` at the same steps. Replicas share the work. If the model is sharded
    (FSDP2, tensor parallel), the ranks score each candidate together, and each writes what it holds. A checkpoint can
    be restored on any number of ranks; what differs between ranks, such as random number generators, experts or the
    position of a loader, needs as many ranks as at the save.

    Threads: ``save``, ``restore`` and ``close`` raise RuntimeError while another of them is running (in another thread,
    or because ``evaluate`` made the call), in the writing thread, and the first two in a forked child.

    Raises StateError for objects that cannot be saved, CheckpointError if the folder is not writable, another process
    writes to it or the ranks do not share it, ValueError and TypeError for arguments that are wrong or exclude each
    other.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizers | None = None,
        *,
        extras: Mapping[str, Any] | None = None,
        evaluate: Evaluate | None = None,
        evaluate_average: Mapping[str, Evaluate] | None = None,
        higher_is_better: bool = False,
        quality: QualityName | Quality = "balanced",
        roles: Mapping[str, str | Bound] | None = None,
        every: Every | None = None,
        keep: Keep | None = None,
        log_to: LogTo | None = None,
        **deprecated: Unpack[Deprecated],
    ) -> None:
        quality, every, keep = options_of("Checkpointer", deprecated, quality, every, keep)
        check_metric(evaluate, quality, keep)
        self._objects = objects_of(model, optimizer, extras or {})
        supported.check(self._objects)
        reshard(models_of(self._objects))
        roles = dict(roles or {})
        log_record = None if log_to is None else logger_of(log_to)
        self._group = Group()
        self._sharded = holds_shards(self._objects, self._group)
        if self._sharded:
            check_for_shards(quality, keep, evaluate_average)
            self._group.replicas = replicas_of(self._objects, self._group)
        reduce = self._group.reduce if self._group.size > 1 else None
        movement = Movement(every, self._objects, reduce=reduce) if isinstance(every, Moved) else None
        schedule = Schedule(every, movement)
        self.skipped: list[CheckpointError] = []
        """Why ``restore`` skipped checkpoints."""
        self.not_restored: list[str] = []
        """What the last ``restore(strict=False)`` left out, and why."""
        self._damaged: set[int] = set()  # steps whose files a restore found damaged
        self._turn, self._closed, self._keeps_copies = Turn(), False, keep.lossless_copy
        self._run = WritableRun(folder)
        with ExitStack() as undo:
            undo.callback(self._group.close)
            lock = undo.enter_context(ExitStack())  # of the run; the writing thread releases it
            hold_for_writing(self._run, lock, self._group)
            metric = evaluate if evaluate is None or isinstance(model, nn.Module) else of_several(evaluate)
            averages = {} if evaluate_average is None else evaluate_average
            subject = LiveModel(models_of(self._objects))
            judge = partial(AverageJudge, averages, self._objects, higher_is_better, self._group)
            self._compressor = Compressor(
                quality,
                None if metric is None else UserMetric(subject, metric, higher_is_better, self._group),
                self._group,
                averages=self._group.run_on_all_ranks(judge),
            )
            self._training = TrainingSource(
                self._objects,
                roles,
                self._compressor.preset,
                self._compressor.method,
                records_gradients=self._compressor.uses_gradients,
                keeps_lossless_copy=keep.lossless_copy,
                group=self._group,
                interval=schedule.interval,
            )
            undo.callback(self._training.close)
            self._end_first_step_check = supported.check_after_first_step(self._objects)
            undo.callback(self._end_first_step_check)
            self._corrections = MomentCorrections(quality.correct_moments)
            check_first_state(self._objects, roles, self._compressor.method.quantizes_vectors, self._group)
            retention, writers = Retention(keep, higher_is_better), Group(alone=self._group.size == 1)
            lock.callback(writers.close)
            self._writer = CommitStage(self._run, writers, retention, self._damaged, log_record, lock.close)
            stages = self._training, self._compressor, self._writer, self._turn, self._group, self._corrections
            memory = Memory.at_start(quality)
            self._saver = Saver(
                self._run, self._objects, roles, schedule, *stages, buffers_of_rank_0(model), memory=memory
            )
            undo.pop_all()

    @property
    def max_degradation(self) -> float:
        """The largest relative loss of quality that one checkpoint may cause. It may be changed at any time.

        From then on every checkpoint may use it, unless ``Quality.training_budget`` was given.
        """
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
        # The error of a write must not replace the error that ended training.
        try:
            self.close()
        except Exception as write_error:
            log.warning("the last checkpoint could not be written: %s", write_error)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due: ``step`` has reached the next multiple of ``every`` since the last one.

        With ``every=Auto(…)``: whether as many steps have passed since the last checkpoint as its cost asks for. With
        ``every=Moved(…)``: whether the weights have moved so far; of several ranks, all must call it then.
        Raises ValueError without ``every``.
        """
        return self._saver.schedule.due(step)

    def restore(
        self, step: int | str | None = None, *, only: str | Collection[str] | None = None, strict: bool = True
    ) -> int | None:
        """Restore the newest checkpoint that verifies into the objects, and return its step.

        Returns None if the run has no checkpoints. Damaged checkpoints are skipped; ``skipped`` and logged warnings say
        why. Everything is checked before anything is changed, and nothing is changed unless everything fits. If loading
        fails all the same, in the code of any object or by a signal, everything is put back; until then the host's
        memory has a copy of the present values. Tensors of the model and the optimizer are filled in place if the
        stored ones fit.

        step: the step or the tag of a checkpoint, instead of the newest.
        only: what to restore, e.g. ``"model"`` or ``("model", "optimizer")``: names of objects, and ``"rng"`` for the
        global random number generators. Everything else is unchanged, but has to verify, too.
        strict: False leaves out what does not fit, such as a new head or another optimizer. ``not_restored`` lists it,
        and a logged warning has the count and the first differences.

        Raises CheckpointError if no checkpoint verifies, or if the requested one does not exist or is damaged;
        StateError if it does not fit the objects; ValueError for an unknown name in ``only``.
        """
        return self._guarded("restore", lambda: self._restore(step, only, strict))

    def _restore(self, step: int | str | None, only: str | Collection[str] | None, strict: bool) -> int | None:
        self._check_open()
        check_sharded_before(self._sharded, self._objects, self._group)
        if optimizers_of(self._objects) and only is None and torch.is_inference_mode_enabled():
            raise RuntimeError(
                "restore in torch.inference_mode() would make tensors that no optimizer may change; call it outside"
            )
        hashes = self._training.hashes
        restorer = Restorer(
            self._run, self._objects, self._group, hashes, self._corrections, only, strict, damaged=self._damaged
        )
        self._group.run_on_all_ranks(self._wait_for_run)
        self.skipped, self.not_restored = restorer.skipped, []
        if (loaded := restorer.restore(step)) is None:
            return None
        self.not_restored = list(loaded.problems)
        header, names, exact = loaded.file.header, loaded.restored_names, loaded.from_lossless_copy
        self._saver.resume(header, loaded.stored, loaded.tensors, names, exact)
        return loaded.step

    def save(self, step: int, *, exact_weights: bool = False) -> Future[Record]:
        """Save the state as the checkpoint of ``step``, an integer from 0 to 2**63 - 1.

        Returns once the state is captured and its configuration is found. Encoding, writing and verifying run in the
        background. ``result()`` of the returned future waits for them and returns the record of the save. A checkpoint
        of the same step is replaced. If it has a tag, or is among the best that ``keep`` says, it stays, under its tag.

        exact_weights: also keep the weights exactly, for all readers: until the next save, or as long as the checkpoint
        has a tag. No effect with ``Keep(lossless_copy=True)``, or for a sharded model.

        Raises the error of the previous save's background write, if it failed; ValueError for a step out of range;
        StateError for a state that cannot be stored. If ``evaluate`` raises or returns no number: raises EvaluateError
        on all ranks if there are several; in a single process only if ``evaluate`` has never worked. Otherwise the
        candidate counts as not good enough, or the weights are stored exactly; a warning and the record say so. Device
        and out-of-memory errors in ``evaluate`` are raised unchanged.

        Whatever is raised, also by a signal handler (Ctrl-C), the training is unchanged, and the checkpoint is saved
        completely or not at all.
        """
        return self._guarded("save", lambda: self._save(step, exact_weights))

    def _save(self, step: int, exact_weights: bool) -> Future[Record]:
        self._check_open()
        check_sharded_before(self._sharded, self._objects, self._group)
        return self._saver.save(checked_step(step), exact_weights and not self._keeps_copies)

    def wait(self) -> None:
        """Wait for the background write, if any, and raise its error, once.

        In the writing thread, where ``log_to`` is called, this returns at once.
        """
        self._writer.thread.wait()

    def _wait_for_run(self) -> None:
        """Wait for the background write. Raises CheckpointError if the run's folder is gone or another one."""
        self.wait()
        self._run.check_lock()

    def records(self) -> list[Record]:
        """Return the records of the run's checkpoints, oldest commit first. Waits for the background write.

        Of several ranks, only rank 0 waits for what it writes; others may not see the last checkpoint yet.
        """
        self._wait_for_run()
        return [record_of(listed) for listed in self._run.listing()[0]]

    def steps(self) -> list[int]:
        """Return the steps of the run's checkpoints, lowest first. Waits as ``records`` does."""
        self._wait_for_run()
        return sorted(self._run.steps())

    def tag(self, name: str, step: int | None = None) -> None:
        """Name the checkpoint of a step, by default the newest. Retention keeps it, and ``restore(name)`` takes it.

        Waits for the background write. If another checkpoint has the tag, it is moved. Of several ranks, rank 0 sets
        the tag, and other ranks need not call this. ``log_to`` may call it, too.

        Raises CheckpointError if there is no such checkpoint, or if the name is not allowed.
        """
        self._wait_for_run()
        if self._group.rank == 0:
            set_tag(self._run, name, self._run.newest() if step is None else self._run.file(step), force=True)
            self._run.delete_unneeded()  # exact weights of the checkpoint that had the tag

    def close(self) -> None:
        """Wait for the last write, raise its error, and release the run. May be called twice.

        If the waiting is interrupted, the write continues and then releases the run. In a forked child, this neither
        waits nor releases: only the parent process does.
        """
        if os.getpid() != self._writer.thread.process:
            self._close(lambda: None)
        else:
            self._guarded("close", lambda: self._close(self._close_writer))

    def _close_writer(self) -> None:
        try:
            self._writer.thread.close()
        finally:
            self._group.close()

    def _close(self, close_writer: Callable[[], None]) -> None:
        self._closed = True
        try:
            close_writer()
        finally:
            self._end_first_step_check()
            self._training.close()
            self._corrections.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._run.folder}: this Checkpointer has been closed; make another one")

    def _guarded(self, name: str, action: Callable[[], T]) -> T:
        """Return the action's result. Raises RuntimeError if the call is not allowed (``Checkpointer``, Threads)."""
        check_process(self._writer.thread.process)
        if self._writer.thread.is_here:
            raise RuntimeError(
                f"{name} was called in the writing thread (by log_to?): call it in the thread that trains"
            )
        with self._group.doing(name):
            return self._turn.run(name, action)
