"""What is stored, without the training that made it: whole states, single tensors, the weights of a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dynaquant.coding.stream import values_of
from dynaquant.container import CheckpointFile
from dynaquant.errors import CheckpointError, StateError
from dynaquant.lazily import Lazy
from dynaquant.run import Run, Tensors, load_tensor
from dynaquant.state import model_in, names_in, state_dict_in, unflatten
from dynaquant.tags import file_of

log = logging.getLogger("dynaquant")
T = TypeVar("T")


class Stored:
    """A checkpoint in a run, or a file that stands alone; opened, and its tensors decoded when they are asked for.

    path: a run's folder, or a file. step: of a run, or a tag; the newest unless given. A checkpoint that was also kept
    as it was (``exact="latest"``) is taken so. Raises CheckpointError when it is not there or not sound, ValueError for
    a step of a file.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | str | None = None) -> None:
        path = Path(path)
        self._small: tuple[Run, CheckpointFile] | None = None  # what can stand in, where the exact one is taken
        self._damage: CheckpointError | None = None
        if path.is_file():
            if step is not None:
                raise ValueError(f"{path} is one checkpoint; a step can be asked for of a run's folder")
            file = CheckpointFile(path)
            self.chain = [file] if file.header.parent is None else Run(path.parent).chain(file)
        else:
            run = Run(path)
            file = file_of(run, step) if step is not None else _newest(run)
            twin = _twin(run, file)
            self.chain = [twin] if twin is not None else run.chain(file)
            self._small = (run, file) if twin is not None else None
        self._open()

    def _open(self) -> None:
        self.file = self.chain[0]
        self.tensors: Mapping[str, Tensor] = Lazy(self.file.header.by_name, self._values)
        """By name; each is decoded, and checked against its hash, whenever it is asked for."""

    def _values(self, name: str) -> Tensor:
        try:
            return values_of(load_tensor(self.chain, name))
        except CheckpointError as error:
            self._damage = error
            raise

    def sound(self, use: Callable[[], T]) -> T:
        """What ``use`` makes of the tensors. Where the exact form turns out to be damaged, ``use`` is called again, and
        the tensors are those of the small form from then on, all of them: the two are not mixed.
        """
        try:
            return use()
        except CheckpointError as error:
            if self._small is None or error is not self._damage:
                raise
            run, file = self._small
            _warn_of_exact(file, error)
            self._small, self.chain = None, run.chain(file)
            self._open()
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
            return unflatten(node, {name: tensors[name] for name in names_in(node) if name in tensors})
        except StateError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None


def _newest(run: Run) -> CheckpointFile:
    summaries, broken = run.summaries()
    if not summaries:
        what = "there are no checkpoints here" if run.folder.exists() else "there is no such file or folder"
        raise broken[0] if broken else CheckpointError(f"{run.folder}: {what}")
    return run.file(summaries[-1].step)


def _twin(run: Run, file: CheckpointFile) -> CheckpointFile | None:
    """The file of a checkpoint as it was; None where it was not kept, or is not sound, which a warning says."""
    try:
        return run.exact(file)
    except CheckpointError as error:
        _warn_of_exact(file, error)
        return None


def _warn_of_exact(file: CheckpointFile, error: CheckpointError) -> None:
    log.warning("the small form of step %d stands in for its exact one: %s", file.header.step, error)


def load(
    path: str | os.PathLike[str], step: int | str | None = None, *, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """The state in a run's newest checkpoint, in that of a step or a tag, or in a file, as plain dictionaries and CPU
    tensors; as it was before it was quantized, where that was kept as well (``exact="latest"``).

    Of a run that a Checkpointer has written the keys are ``"model"``, ``"optimizer"``, the names of the extras,
    ``"rng"``, ``"classes"`` and ``"parameters"``. What was compressed or packed from another program's file comes back
    as that file had it: for weights, as their state dict.

    keys: names of tensors of the model; only they are decoded, and returned by those names.

    Raises CheckpointError when the checkpoint is not there or damaged, KeyError for a key that is not there.
    """
    if keys is not None:
        stored = Stored(path, step)
        names = stored.state_dict
        if missing := [key for key in keys if key not in names]:
            raise KeyError(f"{stored.file.path}: there is no tensor {missing[0]!r}; there are {_some(names)}")
        return stored.sound(lambda: {key: stored.tensors[names[key]] for key in keys})
    if Path(path).is_file():
        stored = Stored(path, step)
        return state_of(stored.file, dict(stored.tensors))
    run = Run(path)
    file = file_of(run, step) if step is not None else _newest(run)
    file, tensors = exact_of(run, file, []) or (file, run.load(file))
    return state_of(file, {name: values_of(stored) for name, stored in tensors.items()})


def load_into(model: nn.Module, path: str | os.PathLike[str], step: int | str | None = None) -> None:
    """Puts the stored weights and buffers of a model into it, one tensor at a time.

    path, step: as for ``load``. Everything is compared before anything is changed: raises StateError, listing what
    differs, when names or shapes are not those of ``model.state_dict()``. Values are cast to the model's dtypes.

    Raises CheckpointError when the checkpoint is not there or damaged. Damage of a tensor is found when its turn comes,
    and the message says that tensors before it have been put in.
    """
    stored = Stored(path, step)
    names, shapes, own = stored.state_dict, stored.shapes, model.state_dict(keep_vars=True)
    problems = [f"{name} is not in it" for name in own if name not in names]
    problems += [f"{name} is in it, and the model has no such tensor" for name in names if name not in own]
    for name in own.keys() & names.keys():
        if not isinstance(own[name], Tensor):
            problems.append(f"{name} of the model is a {type(own[name]).__name__}, which is no tensor")
        elif own[name].is_meta:
            problems.append(f"{name} of the model is on the meta device; give it memory with model.to_empty(device=…)")
        elif own[name].shape != (shape := shapes[names[name]].shape):
            problems.append(f"{name} is {list(shape)} in it and {list(own[name].shape)} in the model")
    if problems:
        shown = "\n  ".join(sorted(problems)[:10] + ([f"… and {len(problems) - 10} more"] if problems[10:] else []))
        raise StateError(f"{stored.file.path} does not fit the model:\n  {shown}\nNothing was changed.")
    places = {(names[name], target.data_ptr()): target for name, target in own.items()}  # tied tensors are decoded once
    changed: set[tuple[str, int]] = set()

    def put() -> None:
        for place, target in places.items():
            value = stored.tensors[place[0]]
            with torch.no_grad():
                target.copy_(value)
            changed.add(place)

    try:
        stored.sound(put)
    except CheckpointError as error:
        error.add_note(f"{len(changed)} tensors before it have been put into the model")
        raise


def state_of(file: CheckpointFile, values: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a checkpoint with these values of its tensors. Raises CheckpointError when it has none."""
    try:
        state = unflatten(file.header.tree, values)
    except StateError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path}: it holds no state")
    return state


def exact_of(run: Run, file: CheckpointFile, skipped: list[CheckpointError]) -> tuple[CheckpointFile, Tensors] | None:
    """The file and the tensors of a checkpoint as they were before they were quantized, if they were kept.

    Adds to skipped why they cannot be used.
    """
    try:
        if (twin := run.exact(file)) is not None:
            return twin, run.load(twin)
    except CheckpointError as error:
        _warn_of_exact(file, error)
        skipped.append(error)
    return None


def _some(names: Collection[str]) -> str:
    shown = list(names)[:3]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
