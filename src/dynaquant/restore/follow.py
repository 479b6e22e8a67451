"""``follow``: keeps a model at the newest checkpoint of a run, while a training writes to it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaquant.engine.forms.stored import form_of, values_of
from dynaquant.errors import CheckpointError
from dynaquant.restore.model_tensors import Models, Targets, expanded_error, targets_in
from dynaquant.store.chain import detect_run_changes, name_step_in_errors, needed_entries, retry_if_run_changed
from dynaquant.store.container import CheckpointFile
from dynaquant.store.files import non_file_kind, user_path
from dynaquant.store.pointers import Pointer, found_at, run_at
from dynaquant.store.reading import Tensors, load_tensors
from dynaquant.training.expanded import can_hold, copy_into
from dynaquant.training.hash_cache import HashCache, sample_of


@dataclass(frozen=True)
class _Held:
    """The checkpoint that the model holds.

    tensors: of the model as stored, with those that they depend on. written: what each target was after its values
    were written: the hash of the stored values, and the memory with PyTorch's count of writes to it.
    """

    file: CheckpointFile
    tensors: Tensors
    written: Mapping[tuple[str, int], tuple[str, tuple[Any, ...]]]


class Follower(Iterator[int]):
    """Keeps a model at the newest checkpoint of a run. ``follow`` makes it.

    Iterating waits for the next checkpoint, loads it and yields its step. After the timeout the iteration ends; another
    ``for`` goes on from there. ``update`` does not wait.
    """

    def __init__(self, path: str | os.PathLike[str], model: Models, poll: float, timeout: float | None) -> None:
        if not (poll > 0 and math.isfinite(poll)):
            raise ValueError(f"poll must be a positive number of seconds, not {poll}")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be a number of seconds from 0 on, or None, not {timeout}")
        self._path = user_path(path)
        kind = "a file" if self._path.is_file() else non_file_kind(self._path)
        if kind not in (None, "a folder") and not (kind == "a file" and isinstance(found_at(self._path), Pointer)):
            raise CheckpointError(f"{path} is {kind}; give the folder of a run")
        self._run, self._model = run_at(self._path), model
        self._poll, self._timeout = poll, timeout
        self._held: _Held | None = None
        self._hashes = HashCache()

    @property
    def step(self) -> int | None:
        """The step that the model holds; None before the first."""
        return None if self._held is None else self._held.file.header.step

    def __next__(self) -> int:
        """Wait for a checkpoint other than the one loaded, load it and return its step."""
        end = math.inf if self._timeout is None else time.monotonic() + self._timeout
        while (step := self.update()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise StopIteration
            time.sleep(min(self._poll, left))
        return step

    def update(self) -> int | None:
        """Load the newest checkpoint, unless the model holds it. Returns its step, or None if nothing was loaded.

        Files whose headers cannot be read are skipped, with a warning for each. Raises CheckpointError if the newest
        checkpoint is damaged, StateError if it does not fit the model. Then the model is unchanged.
        """
        if self._held is None and self._path.is_dir():  # a framework may have made its run since
            found = run_at(self._path)
            self._run = self._run if found.folder == self._run.folder else found
        summaries, broken = self._run.summaries()
        if not summaries and broken:
            raise broken[0]
        if not summaries:
            return None
        self._run.warn_of_skipped(summaries[-1].step, broken)
        if self._held is not None:
            held = self._held.file.header.summary
            # If a file cannot be read now, it may be the one that the model holds. That is no reason to go back.
            if summaries[-1] == held or (broken and summaries[-1].sequence < held.sequence):
                return None
        return retry_if_run_changed(self._load_newest)

    def _load_newest(self) -> int:
        file = self._run.newest()
        targets, _ = targets_in(self._model, file, True, self._hashes)
        tensors = self._decoded(file, list(dict.fromkeys(name for name, _ in targets)), self._held)
        changed = {key: target for key, target in targets.items() if not self._is_there(file, key, target, tensors)}
        # Frozen parameters are read from their file only now. An error must come before the first write.
        read = {name: values_of(stored) for name, _ in changed if form_of(stored := tensors[name]).external}
        values = {**tensors, **read}
        for (name, _), target in changed.items():
            if not target.is_contiguous() and not can_hold(target, values_of(values[name])):
                raise expanded_error(name)
        self._held = None  # if an interrupt leaves the model half written, the next update loads all of it
        for (name, _), target in changed.items():
            with torch.inference_mode(target.is_inference()):
                copy_into(target, values_of(values[name]))
        file.close()
        self._held = _Held(file, tensors, _written(file, targets))
        return file.header.step

    def _decoded(self, file: CheckpointFile, names: list[str], held: _Held | None) -> Tensors:
        """Decode and check tensors and those that they depend on, after what is held if the chain leads to it."""
        chain = self._run.chain(file, None if held is None else held.file)
        on_top = held is not None and chain[-1] is held.file
        files = chain[:-1] if on_top else chain
        with name_step_in_errors(file), detect_run_changes(files):
            with_others = [entry.name for entry in needed_entries(files[:1], names)[0]]
            if held is None or not on_top:
                return load_tensors(chain, with_others)
            needed = needed_entries(files, with_others)
            known = held.tensors.keys()
            if len(needed) < len(files) or known >= {entry.name for entry in needed[-1] if entry.needs_parent}:
                return load_tensors(chain, with_others, decoded=held.tensors)
        return self._decoded(file, names, None)

    def _is_there(self, file: CheckpointFile, key: tuple[str, int], target: Tensor, tensors: Tensors) -> bool:
        """Whether a tensor of the model has the values of a checkpoint already."""
        digest, stored = file.header.by_name[key[0]].hash, tensors[key[0]]
        if self._held is not None and self._held.written.get(key) == (digest, _state_of(target)):
            return True
        alike = (target.dtype, target.shape) == (stored.dtype, stored.shape)
        return form_of(stored).external and alike and self._hashes.of(key[0], target) == digest


def follow(path: str | os.PathLike[str], model: Models, *, poll: float = 1.0, timeout: float | None = None) -> Follower:
    """Keep a model at the newest checkpoint of a run that another process writes: ``for step in follow(…)``.

    - ``path``: the folder of the run, which need not exist yet. Also the folder of a framework that holds the run, e.g.
      the ``output_dir`` of Transformers, or a file or folder of one that stands for a checkpoint of it.
    - ``model``: a module, which may be wrapped; or a dictionary of modules by name, if the checkpoints hold several.
    - ``poll``: seconds between two looks at the folder.
    - ``timeout``: seconds without a new checkpoint after which the iteration ends. 0 does not wait. By default, it
      never ends.

    Each iteration yields a step once its weights and buffers are in the model, cast to the model's dtypes. If several
    checkpoints were committed meanwhile, the newest is loaded. The stored form of the weights stays in memory, so only
    the deltas since the last step are read, and only tensors that have changed are written, in place. If the last step
    was re-coded or deleted in between, what is needed is loaded afresh. All tensors are decoded and compared with their
    hashes before the first is written. The model changes only while the caller waits for the next step. If the caller
    has written to a tensor, it is written again, unless the write went through ``.data`` to few of its values.

    Lossless copies (``Keep(lossless_copy=True)``) are not read: they have no deltas.

    The iterator raises CheckpointError if the newest checkpoint is damaged, and StateError if it does not fit the
    model. Then the model is unchanged. Files whose headers cannot be read are skipped, with a warning for each. Raises
    CheckpointError if ``path`` is another file, ValueError for numbers out of range.
    """
    return Follower(path, model, poll, timeout)


def _written(file: CheckpointFile, targets: Targets) -> dict[tuple[str, int], tuple[str, tuple[Any, ...]]]:
    return {key: (file.header.by_name[key[0]].hash, _state_of(target)) for key, target in targets.items()}


def _state_of(target: Tensor) -> tuple[Any, ...]:
    """Return what tells whether somebody has written to a tensor.

    Tensors of inference mode do not count writes, and PyTorch does not count those through ``.data``, nor that a module
    has put other memory at the same address. A sample of the values tells most of that.
    """
    version = None if target.is_inference() else target._version
    return target.device, target.dtype, target.stride(), version, sample_of(target)
