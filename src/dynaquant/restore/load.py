"""What is stored, without the training that made it: whole states, single tensors, the weights of a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dynaquant.errors import CheckpointError, RunChangedError, StateError
from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import model_in, state_dict_in, tensor_names_in
from dynaquant.state.wrappers import bare, state_dict
from dynaquant.store.chain import detect_run_changes, load_all, retry_if_run_changed
from dynaquant.store.container import CheckpointFile
from dynaquant.store.lossless_copies import LOSSLESS_COPY
from dynaquant.store.memory import explain_out_of_memory
from dynaquant.store.reading import Tensors, load_tensor
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag
from dynaquant.tensors.dequantize import values_of
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.tensors.lazy_mapping import LazyMapping
from dynaquant.training.expanded import can_hold, copy_into

log = logging.getLogger("dynaquant")
T = TypeVar("T")


class Stored:
    """A checkpoint in a run, or a file that stands alone; opened, and its tensors decoded when they are asked for.

    path: a run's folder, or a file. step: of a run, or a tag; the newest unless given. A checkpoint with a lossless
    copy (``exact="latest"``) is taken from there. Its files stay open for as long as this is referred to, so a training
    that goes on, and deletes them, does no harm. Raises CheckpointError when it is not there or not sound, ValueError
    for a step of a file.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | str | None = None) -> None:
        self._path, self._step = Path(path), step
        self._alone = self._path.is_file()
        if self._alone and step is not None:
            raise ValueError(f"{path} is one checkpoint; a step can be asked for of a run's folder")
        self._run = Run(self._path.parent if self._alone else self._path)
        retry_if_run_changed(self._open)

    def _open(self) -> None:
        self._damage: CheckpointError | None = None
        file = CheckpointFile(self._path) if self._alone else chosen(self._run, self._step)
        copy = None if self._alone else _copy_of(self._run, file, self._step is None)
        self._small = file if copy is not None else None  # what can stand in for its lossless copy
        self._take(copy or file)

    def _take(self, file: CheckpointFile) -> None:
        self.chain = self._run.chain(file)
        self.file = file
        self._names = dict.fromkeys(entry.name for entry in file.header.entries if not entry.omitted)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name; each is decoded, and checked against its hash, whenever it is asked for."""
        return LazyMapping(self._names, self._values)  # kept, it would keep this alive, and with it the open files

    def _values(self, name: str) -> Tensor:
        with self._noting_damage(), detect_run_changes(self.chain):
            stored = load_tensor(self.chain, name)
            with explain_out_of_memory(self.file, self.file.header.by_name[name]):
                return values_of(stored)

    def state(self) -> dict[str, Any]:
        """The whole state (``load``)."""
        with self._noting_damage():
            tensors = load_all(self.chain)
            with explain_out_of_memory(self.file, *self.file.header.entries):
                kept = {n: stored for n, stored in tensors.items() if not self.file.header.by_name[n].omitted}
                values = {name: values_of(stored) for name, stored in kept.items()}
        return state_of(self.file, values)

    def check(self, names: Iterable[str]) -> None:
        """Decodes these tensors one by one and keeps none. Raises CheckpointError when one is damaged."""
        for name in names:
            self._values(name)

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._damage = error
            raise

    def sound(self, use: Callable[[], T]) -> T:
        """What ``use`` makes of the tensors. It is called again, with all tensors anew, in two cases: the lossless copy
        turns out to be damaged, and the small form stands in for it; or the run has moved on, and files that were not
        kept open are gone, and the checkpoint that is asked for is found again.
        """
        found = True

        def with_what_is_there() -> T:
            nonlocal found
            if not found:
                self._open()
            found = False
            return self._with_either_form(use)

        return retry_if_run_changed(with_what_is_there)

    def _with_either_form(self, use: Callable[[], T]) -> T:
        try:
            return use()
        except CheckpointError as error:
            if self._small is None or error is not self._damage or isinstance(error, RunChangedError):
                raise
            _warn_of_exact(self._small, error)
            small, self._small = self._small, None
            self._take(small)
            return use()

    @property
    def shapes(self) -> dict[str, Tensor]:
        """Tensors without values (on the meta device) that have the dtypes and shapes of the stored ones, by name."""
        entries = self.file.header.entries
        return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}

    @property
    def state_dict(self) -> dict[str, str]:
        """Names of the model's tensors, as its state dict has them, and under which each is stored.

        Raises CheckpointError when there is no one state dict in the checkpoint that is a model's.
        """
        try:
            found = state_dict_in(self.file.header.tree)
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None
        if missing := [name for name in found.values() if name not in self.tensors]:
            raise CheckpointError(
                f"{self.file.path}: the stored tree of the state names {missing[0]}, which is not there"
            )
        return found

    def model(self, tensors: Mapping[str, Tensor]) -> Any:
        """The model's state dict with these tensors of the checkpoint. Raises CheckpointError when there is none."""
        try:
            node = model_in(self.file.header.tree)
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None
        return self.part(node, tensors)

    def part(self, node: Any, tensors: Mapping[str, Tensor]) -> Any:
        """What a node of the tree stands for, with these tensors. Raises CheckpointError when it is broken."""
        try:
            return unflatten(node, {name: tensors[name] for name in tensor_names_in(node) if name in tensors})
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None


def chosen(run: Run, step: int | str | None) -> CheckpointFile:
    """The checkpoint of a step or a tag, or the newest."""
    return run.newest() if step is None else open_step_or_tag(run, step)


def _copy_of(run: Run, file: CheckpointFile, newest: bool) -> CheckpointFile | None:
    """The lossless copy of a checkpoint. None where it was not kept, or cannot be used, which a warning says.

    newest: whether the checkpoint is to be the newest. Raises RunChangedError where another one is by now.
    """
    try:
        copy = run.lossless_copy(file)
    except CheckpointError as error:
        _warn_of_exact(file, error)
        return None
    if copy is None and newest and file.header.record.get(LOSSLESS_COPY) is not None:
        raise RunChangedError(f"{file.path}: its lossless copy has gone with the next checkpoint")
    return copy


def _warn_of_exact(file: CheckpointFile, error: CheckpointError) -> None:
    log.warning("the small form of step %d stands in for its exact one: %s", file.header.step, error)


def load(
    path: str | os.PathLike[str], step: int | str | None = None, *, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """The state in a run's newest checkpoint, in that of a step or a tag, or in a file, as plain dictionaries and CPU
    tensors; as it was before it was quantized, where that was kept as well (``exact="latest"``).

    Of a run that a Checkpointer has written the keys are ``"model"``, ``"optimizer"`` (of several a dictionary), the
    names of the extras, ``"rng"``, ``"classes"`` and ``"parameters"``. An optimizer's state has the names of its
    parameters for keys; ``Optimizer.load_state_dict`` takes it as it is. What was compressed or packed from another
    program's file comes back as that file had it: for weights, as their state dict.

    keys: names of tensors of the model; only they are decoded, and returned by those names.

    Raises CheckpointError when the checkpoint is not there or damaged, KeyError for a key that is not there.
    """
    stored = Stored(path, step)

    def some(keys: Collection[str]) -> dict[str, Any]:
        names = stored.state_dict
        if missing := [key for key in keys if key not in names]:
            raise KeyError(f"{stored.file.path}: there is no tensor {missing[0]!r}; there are {_some(names)}")
        return {key: stored.tensors[names[key]] for key in keys}

    return stored.sound(stored.state if keys is None else lambda: some(keys))


def load_into(
    model: nn.Module | Mapping[str, nn.Module],
    path: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    strict: bool = True,
) -> list[str]:
    """Puts the stored weights and buffers of a model into it.

    model: or several by name, of a checkpoint that holds several. Names are those of the bare model, whatever wraps it.
    path, step: as for ``load``. Values are cast to the model's dtypes. strict: False leaves out what does not fit.

    Returns what was left out, and why. Everything is compared, decoded and checked before anything is changed, one
    tensor at a time, so that memory for one more tensor is enough. Raises StateError, listing what differs, when names
    or shapes are not those of the model's state dict, or, if not strict, when none are.

    Raises CheckpointError when the checkpoint is not there or damaged; nothing is changed then. (Should the disk fail
    between the check and the end, a note of the error says how many tensors have been put in.)
    """
    stored = Stored(path, step)
    own = _state_dict_of(model)
    return stored.sound(lambda: _put(stored, own, strict))


def _put(stored: Stored, own: Mapping[str, Any], strict: bool) -> list[str]:
    names, shapes = stored.state_dict, stored.shapes
    wrong = {name: what for name in own if name not in names and (what := _missing(stored, name, own[name]))}
    wrong |= {name: f"{name} is in it, and the model has no such tensor" for name in names if name not in own}
    for name in own.keys() & names.keys():
        if not isinstance(own[name], Tensor):
            wrong[name] = f"{name} of the model is a {type(own[name]).__name__}, which is no tensor"
        elif own[name].is_nested:
            wrong[name] = f"{name} of the model is a nested tensor, which cannot be stored"
        elif own[name].is_meta:
            wrong[name] = f"{name} of the model is on the meta device; give it memory with model.to_empty(device=…)"
        elif own[name].shape != (shape := shapes[names[name]].shape):
            wrong[name] = f"{name} is {list(shape)} in it and {list(own[name].shape)} in the model"
    problems = sorted(wrong.values())
    own = {name: target for name, target in own.items() if name in names and name not in wrong}
    if problems and (strict or not own):
        shown = "\n  ".join(problems[:10] + ([f"… and {len(problems) - 10} more"] if problems[10:] else []))
        raise StateError(f"{stored.file.path} does not fit the model:\n  {shown}\nNothing was changed.")
    places = {(names[name], target.data_ptr()): target for name, target in own.items()}  # tied tensors are decoded once
    stored.check(dict.fromkeys(name for name, _ in places))
    for (name, _), target in places.items():
        if not target.is_contiguous() and not can_hold(target, stored.tensors[name]):
            raise StateError(f"the model has the same memory for several elements of {name}: use clone() there")
    changed = 0
    try:
        for (name, _), target in places.items():
            copy_into(target, stored.tensors[name])
            changed += 1
    except CheckpointError as error:
        error.add_note(f"{changed} tensors before it have been put into the model")
        raise
    return problems


def _missing(stored: Stored, name: str, own: Any) -> str | None:
    """What is wrong with a model's tensor of which no values are stored; None where the hash says it is the same."""
    entry = stored.file.header.by_name.get(f"model.{name}")
    if entry is None or not entry.omitted:
        return f"{name} is not in it"
    if isinstance(own, Tensor) and not own.is_meta and tensor_hash(own) == entry.hash:
        return None
    return f"{name} is not stored (role 'omit'), and the model has other values; load the same base first"


def _state_dict_of(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, Any]:
    """The tensors themselves by their names in the bare model, or models."""
    if isinstance(model, nn.Module):
        return dict(state_dict(bare(model), keep_vars=True))
    return {f"{key}.{name}": tensor for key, each in model.items() for name, tensor in _state_dict_of(each).items()}


def state_of(file: CheckpointFile, values: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a checkpoint with these values of its tensors. Raises CheckpointError when it has none."""
    try:
        state = unflatten(file.header.tree, values)
    except StateError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path}: it holds no state")
    return state


def lossless_copy_of(
    run: Run, file: CheckpointFile, skipped: list[CheckpointError]
) -> tuple[CheckpointFile, Tensors] | None:
    """The file and the tensors of a checkpoint as they were before they were quantized, if they were kept.

    Adds to skipped why they cannot be used.
    """
    try:
        if (copy := run.lossless_copy(file)) is not None:
            return copy, run.load(copy)
    except CheckpointError as error:
        _warn_of_exact(file, error)
        skipped.append(error)
    return None


def _some(names: Collection[str]) -> str:
    shown = list(names)[:3]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
