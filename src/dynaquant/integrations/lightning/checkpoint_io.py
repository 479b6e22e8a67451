"""``CheckpointIO``: Lightning's checkpoints as deltas of one another, in a run beside their paths."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import plugins
from torch import Tensor

from dynaquant.errors import CheckpointError
from dynaquant.integrations.lightning import seams
from dynaquant.integrations.lightning.training import Training
from dynaquant.interop.going_on import GoingOn
from dynaquant.interop.model_file import ModelFile
from dynaquant.interop.packing import Metric, Packer
from dynaquant.restore.dropped_moments import names_of_dropped
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.saving.allowance import Allowance
from dynaquant.saving.presets import PRESETS, QualityName
from dynaquant.saving.training_budget import TrainingBudget, has_schedule, mean_learning_rate
from dynaquant.state.flatten import flatten_whole
from dynaquant.state.plain import plain_part
from dynaquant.state.tree import dict_items, tensor_name
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import MAGIC
from dynaquant.store.files import make_folder
from dynaquant.store.pointers import RUN_FOLDER, Pointer, read_pointer, write_pointer
from dynaquant.store.retention import KEYFRAME_EVERY, recode_dependents
from dynaquant.store.tags import tags_of
from dynaquant.store.writing import Base

log = logging.getLogger("dynaquant")
_ADVICE = (
    ". Hyperparameters: self.save_hyperparameters(ignore=[…]) leaves some out. CheckpointIO(skip_objects=True) "
    "leaves out whatever cannot be stored"
)
"""Advice for a checkpoint with a value that cannot be stored."""


class CheckpointIO(plugins.CheckpointIO):  # type: ignore[misc]
    """Saves a Trainer's checkpoints to a run: ``Trainer(plugins=[CheckpointIO()])``.

    The file that Lightning names, e.g. ``last.ckpt``, becomes a small pointer to a checkpoint of the run in the folder
    ``dynaquant`` beside it. ``dynaquant.load`` reads it. ``dynaquant decompress`` makes a file of Lightning from it.

    - ``quality``: ``"high"``, ``"balanced"``, ``"small"`` or ``"lossless"``, as for ``dynaquant.save``.
    - ``metric``: the name of a number that ``validation_step`` logs (needs ``training``), or a function of the
      dictionary of a checkpoint, as in ``dynaquant.save``. (``evaluate`` of a ``Checkpointer`` is a function of the
      model instead.) Without a metric, an estimate from the weights' changes decides.
    - ``higher_is_better``: whether a higher metric is better.
    - ``max_degradation``: how much worse the metric may be, as a fraction, in place of the preset's.
    - ``training``: a callback that the Trainer has, too (``Training``). Without one, all floating-point tensors of the
      state dict are quantized but running statistics, and random numbers are not saved.
    - ``skip_objects``: leaves out what cannot be stored without pickle, with a warning. By default that is an error.

    Raises ValueError for arguments that are out of range or exclude each other, DynaquantError if Lightning is not as
    in the version that was tested.
    """

    def __init__(
        self,
        quality: QualityName = "balanced",
        *,
        metric: str | Metric | None = None,
        higher_is_better: bool = False,
        max_degradation: float | None = None,
        training: Training | None = None,
        skip_objects: bool = False,
    ) -> None:
        seams.check()
        if isinstance(metric, str) and training is None:
            raise ValueError(
                f"the metric {metric!r} is computed by validation_step: give CheckpointIO(…, training=training) and "
                "Trainer(callbacks=[training, …]) the same Training()"
            )
        self._quality, self._max_degradation, self._higher_is_better = quality, max_degradation, higher_is_better
        self._metric, self._training, self._skip_objects = metric, training, skip_objects
        self._going_on = GoingOn()
        self._packer(self._function())  # raises for bad arguments
        budget = Allowance(quality, None, max_degradation, None).budget_of_training
        if budget is not None and (preset := PRESETS[quality]) is not None:
            self._going_on.budget = TrainingBudget(budget, preset.max_degradation)
        self._loaded: StoredCheckpoint | None = None  # what the training goes on from, until the next save
        self._torch = plugins.TorchCheckpointIO()
        self._runs: dict[Path, WritableRun] = {}
        self._alone = threading.Lock()  # AsyncCheckpointIO saves in a thread, and removes in another

    # What Lightning calls.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint to the run beside a path, and write the pointer to it at the path.

        Raises StateError for a value that cannot be stored, EvaluateError if the metric fails, CheckpointError if the
        path cannot be used, OSError if a file cannot be written. Then the path is as before.
        """
        if storage_options is not None:
            raise TypeError("CheckpointIO of dynaquant takes no storage_options")
        metric = self._usable_metric()
        place = _local(path)
        make_folder(place.parent)
        with self._alone:
            run = self._run(place.parent)
            with run.locked():
                self._save(checkpoint, place, run, metric)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint at a path. Files of Lightning itself are loaded as Lightning does.

        map_location: of a checkpoint of a run, a device; anything else means the CPU. Raises FileNotFoundError if there
        is no file, CheckpointError if the checkpoint is missing or damaged.
        """
        place = _local(path)
        if not place.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        dropped: frozenset[str] = frozenset()
        self._loaded = None
        if place.is_file() and (_begins_with(place, MAGIC) or read_pointer(place) is not None):
            device = map_location if isinstance(map_location, str | torch.device) else None
            stored = StoredCheckpoint(place)
            on = None if device is None else torch.device(device)
            found: dict[str, Any] = stored.with_retries(lambda: stored.state(device=on))
            dropped, self._loaded = names_of_dropped(stored.chain), stored
        else:
            found = self._torch.load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only)
        if self._training is not None:
            self._training.loaded(dropped)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the pointer at a path, and the checkpoint, unless another pointer beside it or a tag names it."""
        place = _local(path)
        with self._alone:
            pointer = self._pointer_at(place)
            if pointer is None:
                if place.is_symlink():  # its target may be gone
                    place.unlink()
                else:
                    self._torch.remove_checkpoint(path)
                return
            place.unlink()
            run = self._run(place.parent)
            if _is_of(pointer, run):
                with run.locked():
                    _delete(run, pointer.step)

    # What they are made of.

    def _save(self, checkpoint: dict[str, Any], place: Path, run: WritableRun, metric: Metric | None) -> None:
        replaced = self._pointer_at(place)
        if replaced is not None and not _is_of(replaced, run):
            replaced = None
        tree, tensors = self._flat(checkpoint)
        base = _base(run, place, replaced)
        self._advance(checkpoint)
        packer = self._packer(metric)
        if base is not None:
            packer.continue_from(run.file(base.parent.step).header, base.tensors)
        details = {"name": place.name}
        file = ModelFile("torch", tree, tensors, details, self._weights(tree))
        committed, _ = run.commit(packer.checkpoint(file, _free_step(run, checkpoint)), base)
        write_pointer(place, committed)
        if replaced is not None:
            _delete(run, replaced.step)

    def _advance(self, checkpoint: Mapping[str, Any]) -> None:
        """Tell what is to be saved, and what the training went on from, as a ``Checkpointer`` knows it."""
        stored, self._loaded = self._loaded, None
        if (preset := PRESETS[self._quality]) is None:
            return
        groups = [group for each in checkpoint.get("optimizer_states") or () for group in each.get("param_groups", ())]
        rate = mean_learning_rate(groups, [len(group["params"]) for group in groups])
        if stored is not None:
            try:
                self._going_on.resume(stored.file.header, stored.stored(), rate)
            except CheckpointError as error:  # the training itself is not affected
                log.warning("what it has changed since step %d is not protected: %s", stored.file.header.step, error)
        if self._training is not None and (budget := self._going_on.budget) is not None:
            self._going_on.budget = replace(budget, scaled=self._training.scaled_by_rate)
        if groups:  # no training goes on from a checkpoint without optimizers (``save_weights_only=True``)
            self._going_on.advance(checkpoint.get("global_step", 0), rate, has_schedule(groups))
        if self._training is not None:
            self._going_on.first_tolerances = self._training.first_tolerances(preset, self._going_on.interval)
            self._going_on.exact_optimizers = self._training.exact_optimizers()

    def _function(self) -> Metric | None:
        metric, training = self._metric, self._training
        if not isinstance(metric, str):
            return metric
        assert training is not None
        return lambda checkpoint: training.metric(checkpoint, metric)

    def _usable_metric(self) -> Metric | None:
        """Return the metric; None, with a warning, if nothing was validated yet.

        Raises CheckpointError in a thread: it would change the random numbers of the training.
        """
        if self._metric is None:
            return None
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "a metric cannot be computed while the training goes on: give CheckpointIO no metric, or do not wrap "
                "it in AsyncCheckpointIO"
            )
        if isinstance(self._metric, str) and self._training is not None and not self._training.can_validate:
            log.warning("nothing was validated yet, so this checkpoint is saved without the metric %s", self._metric)
            return None
        return self._function()

    def _packer(self, metric: Metric | None) -> Packer:
        return Packer(self._quality, self._max_degradation, metric, self._higher_is_better, training=self._going_on)

    def _flat(self, checkpoint: dict[str, Any]) -> tuple[Any, Mapping[str, Tensor]]:
        """Return ``flatten_whole`` of a checkpoint, or of the part of it that can be stored."""
        if self._skip_objects:
            checkpoint, left_out = plain_part(checkpoint)
            if left_out:
                log.warning("left out of the checkpoint, as they cannot be stored: %s", ", ".join(left_out))
        return flatten_whole(checkpoint, _ADVICE)

    def _weights(self, tree: Any) -> frozenset[str]:
        """Return the names of the tensors that may be quantized as weights."""
        trained = None if self._training is None else self._training.trained
        pairs = dict_items(dict(dict_items(tree)).get("state_dict"))
        names = (tensor_name(node) for key, node in pairs if trained is None or key in trained)
        return frozenset(name for name in names if name is not None)

    def _run(self, folder: Path) -> WritableRun:
        folder = folder.resolve() / RUN_FOLDER
        return self._runs.setdefault(folder, WritableRun(folder))

    @staticmethod
    def _pointer_at(place: Path) -> Pointer | None:
        """Return the pointer at a path; None if there is none, or a damaged one."""
        if not place.is_file():
            return None
        try:
            return read_pointer(place)
        except CheckpointError as error:
            log.warning("%s", error)
            return None


def _local(path: str | os.PathLike[str]) -> Path:
    """Return a path. Raises CheckpointError for an address of another file system."""
    if "://" in str(path):
        raise CheckpointError(
            f"{path}: runs are written to local and shared folders only; give ModelCheckpoint a dirpath"
        )
    return Path(path)


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _is_of(pointer: Pointer, run: WritableRun) -> bool:
    return pointer.run.resolve() == run.folder


def _free_step(run: WritableRun, checkpoint: dict[str, Any]) -> int:
    """Return the checkpoint's own step, or the next one that the run does not have."""
    step = checkpoint.get("global_step", 0)
    while run.path(step).exists():
        step += 1
    return int(step)


def _base(run: WritableRun, place: Path, replaced: Pointer | None) -> Base | None:
    """Return the newest checkpoint with a short chain, to condition the next one on. None if there is none.

    replaced: what is about to be deleted. Its delta would have to be re-coded.
    """
    deleted = replaced.step if replaced is not None and not _is_named(run, replaced.step, place) else None
    lengths = {known.step: length for known, length in run.chain_lengths().items()}
    steps = [step for step in run.steps() if step != deleted]
    if not steps or lengths.get(steps[-1], KEYFRAME_EVERY) >= KEYFRAME_EVERY:
        return None
    file = run.file(steps[-1])
    try:
        return Base.from_loaded(file.header, run.load(file))
    except CheckpointError as error:
        log.warning("the next checkpoint is a keyframe, as the last one cannot be read: %s", error)
        return None


def _delete(run: WritableRun, step: int) -> None:
    """Delete a checkpoint unless a pointer or a tag names it, and re-code what depends on it."""
    if _is_named(run, step) or not run.path(step).exists():
        return
    needed, notes = recode_dependents(run, {step})
    if step not in needed:
        run.delete(step)
    for note in notes:
        log.warning("%s: %s", run.folder, note)


def _is_named(run: WritableRun, step: int, but: Path | None = None) -> bool:
    """Whether a tag or a pointer beside the run names a step. but: a pointer that does not count."""
    if any(tag.step == step for tag in tags_of(run)):
        return True
    for path in run.folder.parent.iterdir():
        if not path.is_file() or (but is not None and path.name == but.name):
            continue
        try:
            pointer = read_pointer(path)
        except CheckpointError:
            continue
        if pointer is not None and pointer.step == step and _is_of(pointer, run):
            return True
    return False
