"""A stored checkpoint, opened without the training that made it. Decodes tensors on access."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynaquant.errors import CheckpointError, RunChangedError, StateError
from dynaquant.restore.model_tensors import stored_names
from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import model_in, tensor_names_in
from dynaquant.store.chain import detect_run_changes, load_all, retry_if_run_changed
from dynaquant.store.container import CheckpointFile
from dynaquant.store.lossless_copies import LOSSLESS_COPY
from dynaquant.store.memory import explain_out_of_memory
from dynaquant.store.reading import Tensors, load_tensor
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag
from dynaquant.tensors.dequantize import values_of
from dynaquant.tensors.lazy_mapping import LazyMapping

log = logging.getLogger("dynaquant")
T = TypeVar("T")


class StoredCheckpoint:
    """A checkpoint of a run, or a single file. Each access to a tensor decodes it.

    path: the folder of a run, or a file. step: a step or a tag of the run; the newest checkpoint by default. If the
    checkpoint has a lossless copy (``exact="latest"``), that is read. The files stay open as long as this object
    exists, so they can be read even if a training deletes them. Raises CheckpointError if the checkpoint is missing or
    damaged, ValueError for the step of a single file.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | str | None = None) -> None:
        self._path, self._step = Path(path), step
        self._alone = self._path.is_file()
        if self._alone and step is not None:
            raise ValueError(f"{path} is a single checkpoint: leave out the step, or give the folder of a run")
        self._run = Run(self._path.parent if self._alone else self._path)
        retry_if_run_changed(self._open)

    def _open(self) -> None:
        self._damage: CheckpointError | None = None
        file = CheckpointFile(self._path) if self._alone else _checkpoint_file(self._run, self._step)
        copy = None if self._alone else _lossless_copy(self._run, file, self._step is None)
        self._fallback = file if copy is not None else None  # read if the lossless copy is damaged
        self._take(copy or file)

    def _take(self, file: CheckpointFile) -> None:
        self.chain = self._run.chain(file)
        self.file = file
        self._names = dict.fromkeys(entry.name for entry in file.header.entries if not entry.omitted)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name. Each access decodes the tensor and checks it against its hash."""
        # Not an attribute: that would be a reference cycle, which keeps the files open.
        return LazyMapping(self._names, self._values)

    def _values(self, name: str) -> Tensor:
        with self._noting_damage(), detect_run_changes(self.chain):
            stored = load_tensor(self.chain, name)
            with explain_out_of_memory(self.file, self.file.header.by_name[name]):
                return values_of(stored)

    def state(self) -> dict[str, Any]:
        """Return the whole state, as ``load`` does."""
        with self._noting_damage():
            tensors = load_all(self.chain)
            with explain_out_of_memory(self.file, *self.file.header.entries):
                kept = {n: stored for n, stored in tensors.items() if not self.file.header.by_name[n].omitted}
                values = {name: values_of(stored) for name, stored in kept.items()}
        return state_from(self.file, values)

    def check(self, names: Iterable[str]) -> None:
        """Decode tensors one by one without keeping them. Raises CheckpointError if one is damaged."""
        for name in names:
            self._values(name)

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._damage = error
            raise

    def with_retries(self, use: Callable[[], T]) -> T:
        """Return the result of ``use``, which reads tensors of this checkpoint.

        ``use`` is called again from the start in two cases. If the lossless copy is damaged, the second call reads the
        checkpoint itself. If a writer has deleted files that were not open yet, the checkpoint is opened again first.
        """
        is_open = True

        def attempt() -> T:
            nonlocal is_open
            if not is_open:
                self._open()
            is_open = False
            return self._with_fallback(use)

        return retry_if_run_changed(attempt)

    def _with_fallback(self, use: Callable[[], T]) -> T:
        try:
            return use()
        except CheckpointError as error:
            if self._fallback is None or error is not self._damage or isinstance(error, RunChangedError):
                raise
            _warn_of_unusable_copy(self._fallback, error)
            file, self._fallback = self._fallback, None
            self._take(file)
            return use()

    @property
    def shapes(self) -> dict[str, Tensor]:
        """Tensors on the meta device, without values, with the dtypes and shapes of the stored ones, by name."""
        entries = self.file.header.entries
        return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}

    @property
    def state_dict(self) -> dict[str, str]:
        """The stored name of each tensor of the model's state dict (``model_tensors.stored_names``)."""
        return stored_names(self.file)

    def model_state(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the model's state dict with the given tensors. Raises CheckpointError if there is no model."""
        try:
            node = model_in(self.file.header.tree)
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None
        return self.state_part(node, tensors)

    def state_part(self, node: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Return the part of the state under a node of the tree. Raises CheckpointError if the node is malformed."""
        try:
            return unflatten(node, {name: tensors[name] for name in tensor_names_in(node) if name in tensors})
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None


def _checkpoint_file(run: Run, step: int | str | None) -> CheckpointFile:
    """Return the checkpoint of a step or a tag; None: the newest."""
    return run.newest() if step is None else open_step_or_tag(run, step)


def _lossless_copy(run: Run, file: CheckpointFile, newest: bool) -> CheckpointFile | None:
    """Return the lossless copy of a checkpoint. None if it was not kept, or, with a warning, if it is unusable.

    newest: whether the newest checkpoint was asked for. Raises RunChangedError if there is a newer one now.
    """
    try:
        copy = run.lossless_copy(file)
    except CheckpointError as error:
        _warn_of_unusable_copy(file, error)
        return None
    if copy is None and newest and file.header.record.get(LOSSLESS_COPY) is not None:
        raise RunChangedError(f"{file.path}: its lossless copy was deleted when the next checkpoint was committed")
    return copy


def _warn_of_unusable_copy(file: CheckpointFile, error: CheckpointError) -> None:
    log.warning(
        "the lossless copy of step %d cannot be used, reading the checkpoint itself instead: %s",
        file.header.step,
        error,
    )


def state_from(file: CheckpointFile, values: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state of a checkpoint with the given tensors. Raises CheckpointError if it holds no state."""
    try:
        state = unflatten(file.header.tree, values)
    except StateError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path}: it holds no state")
    return state


def load_lossless_copy(
    run: Run, file: CheckpointFile, skipped: list[CheckpointError], load: Callable[[CheckpointFile], Tensors]
) -> tuple[CheckpointFile, Tensors] | None:
    """Return the file and the tensors of a checkpoint's lossless copy. None if there is none, or if it is unusable.

    The reason why it is unusable is added to ``skipped``. load: decodes the tensors of a file.
    """
    try:
        if (copy := run.lossless_copy(file)) is not None:
            return copy, load(copy)
    except CheckpointError as error:
        _warn_of_unusable_copy(file, error)
        skipped.append(error)
    return None
