"""A stored checkpoint, opened without the training that made it. Decodes tensors on access."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.tensors.dtypes import dtype_named
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.errors import CheckpointError, RunChangedError, StateError
from dynaquant.restore.model_tensors import stored_names, warn_if_ranks_differ
from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import model_in, node_at, tensor_names_in
from dynaquant.store.chain import chain_of, detect_run_changes, retry_if_run_changed
from dynaquant.store.container import CheckpointFile
from dynaquant.store.decoding import explain_out_of_memory
from dynaquant.store.files import user_path
from dynaquant.store.pointers import Pointer, found_at, run_at
from dynaquant.store.reading import Tensors, load_all, load_tensor, load_values
from dynaquant.store.run import LOSSLESS_COPY, Run
from dynaquant.store.tags import open_step_or_tag

log = logging.getLogger("dynaquant")
T = TypeVar("T")
PathOrFile = str | os.PathLike[str] | BinaryIO
"""A path, or a binary file object."""
Parents = PathOrFile | list[PathOrFile] | tuple[PathOrFile, ...]
"""The file that a delta was coded against. If that is a delta too, a list: the file, its own parent, …"""


class StoredCheckpoint:
    """A checkpoint of a run, or a single file. Each access to a tensor decodes it.

    path: the folder of a run, or a single file, which may be a file object. Also what a framework has in their place
    (``pointers.found_at``). step: a step or a tag of the run; the newest checkpoint by default. parents: files that a
    single file was coded against, if they are not where it says. If the checkpoint has a lossless copy
    (``Keep(lossless_copy=True)``), that is read. The files stay open as long as this object exists, so they can be read
    even if a training deletes them. Raises CheckpointError if the checkpoint is missing or damaged, ValueError for the
    step or the parents of anything else.
    """

    def __init__(self, path: PathOrFile, step: int | str | None = None, parents: Parents = ()) -> None:
        self._step = step
        self._in_memory: CheckpointFile | None = None
        if isinstance(path, str | os.PathLike):
            self._path = user_path(path)
        else:
            self._in_memory = opened(path)
            self._path = self._in_memory.path
        self._is_pointer = self._in_memory is None and isinstance(found_at(self._path), Pointer)
        self._alone = self._in_memory is not None or (not self._is_pointer and self._path.is_file())
        if (self._alone or self._is_pointer) and step is not None:
            raise ValueError(f"{path} is a single checkpoint: leave out the step, or give the folder of a run")
        given = parents if isinstance(parents, list | tuple) else [parents]
        if given and not self._alone:
            raise ValueError(f"{path} is a run, which knows the parents of its checkpoints: leave out the parent")
        self._given = [opened(each) for each in given]
        self._run = Run(self._path.parent) if self._alone else run_at(self._path)
        retry_if_run_changed(self._open)

    def _open(self) -> None:
        self._damage: CheckpointError | None = None
        file = self._in_memory or self._opened()
        newest = self._step is None and not self._is_pointer
        copy = None if self._alone else _lossless_copy(self._run, file, newest)
        self._fallback = file if copy is not None else None  # read if the lossless copy is damaged
        self._take(copy or file)

    def _opened(self) -> CheckpointFile:
        if self._is_pointer and isinstance(pointer := found_at(self._path), Pointer):  # as it is now
            return pointer.file()
        if self._alone:
            return CheckpointFile(self._path)
        return self._run.newest() if self._step is None else open_step_or_tag(self._run, self._step)

    def _take(self, file: CheckpointFile) -> None:
        self.chain = chain_of(file, self._run.path, self._given) if self._alone else self._run.chain(file)
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

    def stored(self) -> Tensors:
        """Return all tensors as they are stored, each checked against its hash."""
        return load_all(self.chain, threads=_native.threads())

    def state(self, part: str | None = None, device: torch.device | None = None) -> Any:
        """Return the whole state, or the part at a path in it, as ``load`` does.

        Decodes only the tensors of the part. device: of the tensors, by default the CPU. Raises KeyError if there is no
        such part.
        """
        node, names = self.file.header.tree, None
        if part is not None:
            node = self._node_of(part)
            names = [name for name in dict.fromkeys(tensor_names_in(node)) if name in self._names]
        with self._noting_damage():
            values = load_values(self.chain, self._names if names is None else names, _native.threads())
        return built_from(self.file, node, values, device)

    def _node_of(self, part: str) -> Any:
        try:
            return node_at(self.file.header.tree, part)
        except KeyError as error:
            raise KeyError(f"{self.file.path}: there is no part {part!r} of the state; {error.args[0]}") from None

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
        return {
            entry.name: torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta") for entry in entries
        }

    @property
    def state_dict(self) -> dict[str, str]:
        """The stored name of each tensor of the model's state dict (``model_tensors.stored_names``)."""
        return stored_names(self.file)

    def model_state(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the model's state dict with the given tensors. Logs a warning if they differ between ranks.

        Raises CheckpointError if there is no model.
        """
        try:
            node = model_in(self.file.header.tree)
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None
        warn_if_ranks_differ(self.file, tensor_names_in(node))
        return self.state_part(node, tensors)

    def state_part(self, node: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Return the part of the state under a node of the tree. Raises CheckpointError if the node is malformed."""
        names = dict.fromkeys(tensor_names_in(node))
        return built_from(self.file, node, {name: tensors[name] for name in names if name in tensors})


def opened(file: PathOrFile) -> CheckpointFile:
    """Open a checkpoint file, by its path or as a file object, which is read to its end.

    Raises CheckpointError if it is not one, TypeError for anything but a path or a binary file object.
    """
    if isinstance(file, str | os.PathLike):
        return CheckpointFile(user_path(file))
    content = file.read() if hasattr(file, "read") else None
    if not isinstance(content, bytes):
        raise TypeError(f"give a path or a file object that is open for reading bytes, not {file!r}")
    if not content:
        raise CheckpointError(f"{file!r}: there is nothing to read; go back to its beginning with seek(0)")
    name = getattr(file, "name", None)
    return CheckpointFile(Path(name if isinstance(name, str) else repr(file)), content)


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


def built_from(
    file: CheckpointFile,
    node: Any,
    values: dict[str, Tensor],
    device: torch.device | None = None,
    stored_strides: bool = True,
) -> Any:
    """Return the state under a node of the tree. device, stored_strides: as for ``unflatten``.

    Raises CheckpointError if the tree is malformed.
    """
    try:
        return unflatten(node, values, device, stored_strides)
    except StateError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


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
