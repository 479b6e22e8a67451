"""``CheckpointIO``: Lightning's checkpoints as deltas of one another, in a run beside their paths."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import plugins
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from dynaquant.errors import CheckpointError, StateError
from dynaquant.integrations.lightning.paths import (
    base_for,
    begins_with,
    delete_unnamed,
    is_of,
    is_of_tuner,
    local_path,
    paths_beside,
    pointer_at,
)
from dynaquant.integrations.lightning.progress import Last, Progress, progress_at
from dynaquant.integrations.lightning.training import Training
from dynaquant.integrations.shared import BEST, check_exact, check_version, free_step
from dynaquant.interop.packing import Metric, Packer
from dynaquant.interop.whole_state import WholeState
from dynaquant.options import Quality, QualityName, options_of
from dynaquant.restore.dropped_moments import names_of_dropped
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.saving.log_to import in_one_line
from dynaquant.saving.memory import Memory
from dynaquant.saving.presets import PRESETS
from dynaquant.saving.record import record_of, timed
from dynaquant.saving.source import Source
from dynaquant.state.flatten import flatten_whole
from dynaquant.state.plain import plain_part
from dynaquant.state.subclasses import is_wrapper
from dynaquant.state.tree import dict_items, tensor_name
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import MAGIC
from dynaquant.store.files import make_folder
from dynaquant.store.pointers import FIRST_BYTES, RUN_FOLDER, write_pointer
from dynaquant.store.tags import set_tag

log = logging.getLogger("dynaquant")
_IN_TRAINING = "current_model_state"
"""Where the callback ``WeightAveraging`` keeps the state dict of the weights in training."""
_ADVICE = (
    ". Hyperparameters: self.save_hyperparameters(ignore=[…]) leaves some out. CheckpointIO(skip_objects=True) "
    "leaves out whatever cannot be stored"
)
"""Advice for a checkpoint with a value that cannot be stored."""


class CheckpointIO(plugins.CheckpointIO):  # type: ignore[misc]
    """Saves a Trainer's checkpoints to a run: ``Trainer(plugins=[CheckpointIO()])``.

    The file that Lightning names, e.g. ``last.ckpt``, becomes a small pointer to a checkpoint of the run in the folder
    ``dynaquant`` beside it. ``dynaquant.load`` reads it. ``dynaquant decompress`` makes a file of Lightning from it.

    - ``quality``: ``"high"``, ``"balanced"``, ``"small"``, ``"lossless"``, or a ``Quality``.
    - ``metric``: the name of a number that ``validation_step`` logs (needs ``training``), or a function of the
      dictionary of a checkpoint, as in ``dynaquant.save``. (``evaluate`` of a ``Checkpointer`` is a function of the
      model instead.) Without a metric, an estimate from the weights' changes decides.
    - ``higher_is_better``: whether a higher metric is better.
    - ``training``: a callback that the Trainer has, too (``Training``). Without one, all floating-point tensors of the
      state dict are quantized but running statistics, and random numbers are not saved.
    - ``skip_objects``: leaves out what cannot be stored without pickle, with a warning. By default that is an error.
      With ``training``, ``fit`` raises it for weights and hyperparameters before it trains.
    - ``exact``: ``"best"`` keeps the weights of the best file of a ``ModelCheckpoint`` exactly, so ``ckpt_path="best"``
      is what was validated. In the run, the checkpoint has the tag ``best``; with several that monitor something,
      ``best-val_loss`` and so on. None: they are quantized as all others.
    - ``deprecated``: ``max_degradation``, ``training_budget`` and ``expected_restores`` instead of a ``Quality``.

    Raises ValueError for arguments that are out of range or exclude each other, DynaquantError for a version of
    Lightning that is not supported.
    """

    def __init__(
        self,
        quality: QualityName | Quality = "balanced",
        *,
        metric: str | Metric | None = None,
        higher_is_better: bool = False,
        training: Training | None = None,
        skip_objects: bool = False,
        exact: Literal["best"] | None = "best",
        **deprecated: Any,
    ) -> None:
        check_version("lightning")
        self._logged = metric if isinstance(metric, str) else None
        if isinstance(metric, str):
            if training is None:
                raise ValueError(
                    f"the metric {metric!r} is computed by validation_step: give CheckpointIO(…, training=training) "
                    "and Trainer(callbacks=[training, …]) the same Training()"
                )
            metric = partial(training.metric, name=metric)
        check_exact(exact)
        self._exact = exact
        takes, also = ("max_degradation", "training_budget", "expected_restores"), ("method", "configuration")
        self._quality = options_of("CheckpointIO", deprecated, quality, takes=takes, also=also).quality
        self._preset, self._higher_is_better = PRESETS[self._quality.preset], higher_is_better
        self._metric, self._training, self._skip_objects = metric, training, skip_objects
        self._packer(metric)  # raises for bad arguments
        self._last = Last(Memory.at_start(self._quality))
        self._loaded: StoredCheckpoint | None = None  # what the training goes on from, until the next save
        self._torch = plugins.TorchCheckpointIO()
        self._runs: dict[Path, WritableRun] = {}
        self._warned: set[str] = set()  # texts of warnings, which no other save repeats
        if training is not None:
            training.check_at_start = self._check
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
        if is_of_tuner(path):
            self._torch.save_checkpoint(checkpoint, path)
            return
        metric = self._usable_metric()
        place = local_path(path)
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

        In place of a damaged ``last.ckpt``, the newest checkpoint is returned that a file beside it stands for and that
        verifies. A warning says so.

        map_location: of a checkpoint of a run, a device; anything else means the CPU. Raises FileNotFoundError if there
        is no file, CheckpointError if the checkpoint is missing or damaged.
        """
        place = local_path(path)
        if not place.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        dropped: frozenset[str] = frozenset()
        if not is_of_tuner(path):
            self._loaded = None
        if place.is_file() and (begins_with(place, MAGIC) or begins_with(place, FIRST_BYTES)):
            device = map_location if isinstance(map_location, str | torch.device) else None
            stored, found = self._opened(place, None if device is None else torch.device(device))
            dropped, self._loaded = names_of_dropped(stored.chain), stored
            log.info("loaded step %d from %s", stored.file.header.step, stored.file.path)
        else:
            found = self._torch.load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only)
        if self._training is not None and not is_of_tuner(path):
            self._training.loaded(dropped)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the pointer at a path, and the checkpoint, unless another pointer beside it or a tag names it."""
        place = local_path(path)
        with self._alone:
            pointer = pointer_at(place)
            if pointer is None:
                if place.is_symlink():  # its target may be gone
                    place.unlink()
                else:
                    self._torch.remove_checkpoint(path)
                return
            place.unlink()
            run = self._run(place.parent)
            if is_of(pointer, run):
                with run.locked():
                    delete_unnamed(run, pointer.step)

    # What they are made of.

    def _opened(self, place: Path, device: torch.device | None) -> tuple[StoredCheckpoint, dict[str, Any]]:
        """Return the checkpoint at a path and its state. For a damaged ``last.ckpt``, a sound file beside it counts."""
        try:
            return _decoded(place, device)
        except CheckpointError as error:
            others = paths_beside(place)
            if not place.name.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):
                names = ", ".join(path.name for path in others)
                error.add_note(f"newest first, these are beside it: {names}" if names else "no other file is beside it")
                raise
            for other in others:
                with suppress(CheckpointError):
                    found = _decoded(other, device)
                    log.warning("%s is loaded in place of %s, which is damaged: %s", other, place, error)
                    return found
            raise

    def _save(self, checkpoint: dict[str, Any], place: Path, run: WritableRun, metric: Metric | None) -> None:
        replaced = pointer_at(place)
        if replaced is not None and not is_of(replaced, run):
            replaced = None
        tree, tensors = self._flat(checkpoint)
        base = base_for(run, place, replaced)
        last = self._last
        now = Progress(last.memory, last.steps)
        if self._preset is not None:
            now = progress_at(checkpoint, last, self._loaded, self._training)
        weights, averages = self._weights_and_averages(tree)
        packer = self._packer(_of_weights_in_training(metric) if metric is not None and averages else metric)
        memory = now.memory
        if base is not None and not now.is_restored and base.parent.identity != last.identity:
            memory = memory.following(run.file(base.parent.step).header, base.tensors)
        state = WholeState("torch", tree, tensors, {"name": place.name}, weights, averages)
        tag = _tag_of_best(checkpoint, place)
        source = self._source(packer, state, now, tag is not None and self._exact is not None)
        step = free_step(run, int(checkpoint.get("global_step", 0)))
        packed = packer.packed(state, step, memory, source, now.steps.between)
        seconds: dict[str, float] = {}
        with timed(seconds, "write"):
            committed, _, memory = packed.commit(run, base)
        # From here on the checkpoint is in the run, so the next save goes on from it, also if what follows fails.
        self._last, self._loaded = Last(memory, now.steps, committed.header.identity), None
        if tag is not None:
            set_tag(run, tag, committed, force=True)
        write_pointer(place, committed)
        log.info(in_one_line(record_of(committed, seconds)))
        if replaced is not None:
            delete_unnamed(run, replaced.step)

    def _source(self, packer: Packer, state: WholeState, now: Progress, exact_weights: bool) -> Source:
        """Return a checkpoint of Lightning as a source. exact_weights: whether a copy has the weights exactly."""
        if self._training is None or self._preset is None:
            source = packer.source(state)
        else:
            source = packer.source(state, self._training.exact_optimizers())
            tolerances = self._training.first_tolerances(self._preset, now.steps.between)
            source = replace(source, first_tolerances=tolerances)
        exact = {n for n, label in source.labels.items() if exact_weights and label.role in ("weight", "average")}
        position = now.position
        return replace(source, position=None if position is None else lambda: position, copied_exactly=exact)

    def _usable_metric(self) -> Metric | None:
        """Return the metric; None, with a warning, if nothing was validated yet."""
        if self._metric is None:
            return None
        if threading.current_thread() is not threading.main_thread():  # it would change the training's random numbers
            raise CheckpointError(
                "a metric cannot be computed while the training goes on: give CheckpointIO no metric, or do not wrap "
                "it in AsyncCheckpointIO"
            )
        if self._logged is not None and self._training is not None and not self._training.can_validate:
            self._warn(f"nothing was validated yet, so checkpoints are saved without the metric {self._logged}")
            return None
        return self._metric

    def _packer(self, metric: Metric | None) -> Packer:
        return Packer(self._quality, metric, self._higher_is_better)

    def _flat(self, checkpoint: dict[str, Any]) -> tuple[Any, Mapping[str, Tensor]]:
        """Return ``flatten_whole`` of a checkpoint, or of the part of it that can be stored."""
        if self._skip_objects:
            checkpoint, left_out = plain_part(checkpoint)
            if left_out:
                self._warn(f"left out of checkpoints, as they cannot be stored: {', '.join(left_out)}")
        self._check(checkpoint)
        return flatten_whole(checkpoint, _ADVICE)

    def _warn(self, text: str) -> None:
        """Log a warning, but the same one only once."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def _check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise StateError for weights or hyperparameters that cannot be stored, if they are not to be left out."""
        if self._skip_objects:
            return
        for name, value in checkpoint.get("state_dict", {}).items():
            if is_wrapper(value):
                raise StateError(
                    f"{name} is a {type(value).__qualname__}, and Lightning cannot load the tensors that it is made "
                    "of. If every training begins with the same values, let state_dict() of the module leave it out, "
                    "and set self.strict_loading = False. Otherwise train with a dynaquant.Checkpointer"
                )
        flatten_whole({"hyper_parameters": checkpoint.get("hyper_parameters", {})}, _ADVICE)

    def _weights_and_averages(self, tree: Any) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of the tensors that may be quantized as weights, and of averages of weights."""
        trained = None if self._training is None else self._training.trained
        parts = dict(dict_items(tree))

        def names(part: str) -> frozenset[str]:
            pairs = dict_items(parts.get(part))
            found = (tensor_name(node) for key, node in pairs if trained is None or key in trained)
            return frozenset(name for name in found if name is not None)

        if _IN_TRAINING not in parts or "averaging_state" not in parts:
            return names("state_dict"), frozenset()
        return names(_IN_TRAINING), names("state_dict")  # ``WeightAveraging`` puts averages in the place of the weights

    def _run(self, folder: Path) -> WritableRun:
        folder = folder.resolve() / RUN_FOLDER
        return self._runs.setdefault(folder, WritableRun(folder))


def _decoded(place: Path, device: torch.device | None) -> tuple[StoredCheckpoint, dict[str, Any]]:
    stored = StoredCheckpoint(place)
    state: dict[str, Any] = stored.with_retries(lambda: stored.state(device=device))
    return stored, state


def _tag_of_best(checkpoint: Mapping[str, Any], place: Path) -> str | None:
    """Return the tag for a path that is the best of a ``ModelCheckpoint``; None if it is not."""
    states = [each for each in (checkpoint.get("callbacks") or {}).values() if isinstance(each, Mapping)]
    monitors = [each for each in states if each.get("monitor") is not None and "best_model_path" in each]
    for each in monitors:
        if each["best_model_path"] and Path(each["best_model_path"]).resolve() == place.resolve():
            name = re.sub(r"[^A-Za-z0-9_.+-]", "-", each["monitor"])[:80]
            return BEST if len(monitors) == 1 else f"{BEST}-{name}"
    return None


def _of_weights_in_training(metric: Metric) -> Metric:
    """Return a metric that sees the weights in training where checkpoints have their average."""
    return lambda checkpoint: metric({**checkpoint, "state_dict": checkpoint[_IN_TRAINING]})
