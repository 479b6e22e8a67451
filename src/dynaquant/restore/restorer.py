"""Finds the checkpoint to restore, checks that it fits, and puts it into the objects: all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dynaquant.errors import CheckpointError, StateError
from dynaquant.restore.fitting import fitting, refuse, selected
from dynaquant.restore.in_place import already_there, fill, new, places
from dynaquant.restore.load import lossless_copy_of, state_of
from dynaquant.store.container import CheckpointFile
from dynaquant.store.memory import explain_out_of_memory
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag
from dynaquant.tensors.stored import External, StoredTensor
from dynaquant.training import rng
from dynaquant.training.changes import HashCache
from dynaquant.training.collect import collect_to_compare, stored_rng_state
from dynaquant.training.load_state import fill_in_omitted, load_state, undo_of
from dynaquant.training.objects import CHECKED, MAIN, RESERVED
from dynaquant.training.ranks import Group

log = logging.getLogger("dynaquant")

_ADVICE = (
    "Build the objects as they were when it was saved, use another folder for another training, or restore what fits: "
    "restore(strict=False), restore(only=('model',))."
)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was decoded and fits.

    tensors: as its file has them. parts: what each object loads; the tensors of the model and the optimizer are their
    own where they can be filled; fills: these, and what with. randomness: for the global generators, if they are to be
    restored. taken: the names of the tensors that are restored into models and optimizers. from_lossless_copy: whether
    the state comes from the lossless copy. problems: what does not fit and is left out.
    """

    file: CheckpointFile
    tensors: Mapping[str, StoredTensor]
    parts: Mapping[str, Any]
    fills: Sequence[tuple[Tensor, StoredTensor]]
    randomness: Mapping[str, Any] | None
    taken: frozenset[str]
    from_lossless_copy: bool
    problems: Sequence[str]

    @property
    def step(self) -> int:
        """Of the training."""
        return self.file.header.step


@dataclass
class Restorer:
    """Restores checkpoints of a run into the objects of a training.

    only: what to restore, None for everything. strict: whether anything that does not fit is an error; otherwise it is
    left out.
    """

    run: Run
    objects: Mapping[str, Any]
    group: Group
    hashes: HashCache
    only: str | Collection[str] | None = None
    strict: bool = True
    skipped: list[CheckpointError] = field(default_factory=list)
    """Why checkpoints were passed over."""
    damaged: set[int] = field(default_factory=set)
    """Their steps."""

    def __post_init__(self) -> None:
        self._selected, self._with_randomness = selected(self.objects, self.only)

    def restore(self, step: int | str | None) -> Loaded | None:
        """Puts the checkpoint of a step or a tag, or the newest that verifies, into the objects; None if there is none.

        Collective: rank 0 finds out which checkpoint it is, and the others take the same one. Nothing is changed
        anywhere before it fits everywhere.
        """
        first = self.group.rank == 0
        loaded = self.group.run_on_all_ranks(lambda: self._newest(step) if first else None)
        found = self.group.from_rank_0(loaded.step if loaded else None)
        if found is None:
            return None
        loaded = self.group.run_on_all_ranks(lambda: loaded or self._fitting(self.run.file(found)))
        assert loaded is not None
        self._put(loaded)
        if self.group.rank == 0:
            for problem in loaded.problems:
                log.warning("restored step %d without what does not fit: %s", loaded.step, problem)
        return loaded

    def _newest(self, step: int | str | None) -> Loaded | None:
        if step is not None:
            return self._fitting(open_step_or_tag(self.run, step))
        summaries, broken = self.run.summaries()
        self.skipped += broken
        for summary in reversed(summaries):
            try:
                loaded = self._fitting(self.run.file(summary.step))
            except CheckpointError as error:
                self.skipped.append(error)
                self.damaged.add(summary.step)
                continue
            for reason in self.skipped:
                log.warning("restored step %d; passed over %s", loaded.step, reason)
            return loaded
        if not self.skipped:
            return None
        reasons = "\n  ".join(str(error) for error in self.skipped)
        raise CheckpointError(
            f"{self.run.folder}: no checkpoint of this run can be restored:\n  {reasons}\n"
            "Nothing was changed. To train from the beginning, use an empty folder."
        )

    def _fitting(self, file: CheckpointFile) -> Loaded:
        """A checkpoint that fits the objects."""
        tensors = self.run.load(file)
        source, stored = lossless_copy_of(self.run, file, self.skipped) or (file, tensors)
        # Outside: an object's own error is no damage of a file.
        now = collect_to_compare(self.objects)
        rank = self.group.rank
        try:
            there = already_there(now, stored, self.hashes)
            omitted = {entry.name for entry in source.header.entries if entry.omitted}
            own_memory = places(now, source.header.tree, {n: stored[n] for n in stored.keys() - there - omitted})
            with explain_out_of_memory(source, *source.header.entries):
                needed = [name for name in stored if name not in there and name not in omitted]
                values = {name: own_memory[name] if name in own_memory else new(stored[name]) for name in needed}
                for name in own_memory:
                    if isinstance(tensor := stored[name], External):
                        tensor.values()  # raises while nothing has been changed
            values.update(there)
            state = state_of(source, values)
            fill_in_omitted(now, state, omitted)
            if not set(RESERVED) <= set(state):
                raise KeyError(*set(RESERVED) - set(state))
            fit = fitting(self.objects, now, state, rank, None if self.only is None else self._selected)
            restored = tuple(f"{name}." for name in self._selected)
            changed = sorted(name for name in omitted - there.keys() if name.startswith(restored))
            what = "is not stored (role 'omit'), and the model has other values; load the same base first"
            fit.problems.extend(f"{name} {what}" for name in changed)
            if self.strict:
                refuse(fit.problems, f"{file.path} (step {file.header.step})", _ADVICE)
            own = stored_rng_state(state, rank)
            if own is not None and self._with_randomness:
                rng.check(own)
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file.path}: it holds no state of a training ({error!r})") from error
        if own is None:
            log.warning("%s was saved by fewer ranks: rank %d keeps its random numbers", file.path, rank)
        for note in fit.notes if rank == 0 else ():
            log.warning("step %d: %s", file.header.step, note)
        used = {tensor.data_ptr() for tensor in _tensors_in([fit.parts[n] for n in fit.parts])}
        taken = frozenset(name for name, value in values.items() if value.data_ptr() in used)
        fills = [(place, stored[name]) for name, place in own_memory.items() if name in taken]
        randomness = own if self._with_randomness else None
        return Loaded(file, tensors, fit.parts, fills, randomness, taken, source is not file, fit.problems)

    def _put(self, loaded: Loaded) -> None:
        """First what may fail by itself, and can be undone; then what was checked."""
        undo: list[Callable[[], None]] = []
        try:
            self.group.run_on_all_ranks(lambda: put_unchecked(self.objects, loaded.parts, undo))
        except BaseException:
            for put_back in reversed(undo):
                try:
                    put_back()
                except Exception as error:  # the others are put back all the same
                    log.warning("an extra could not be put back as it was: %r", error)
            raise
        self.group.run_on_all_ranks(lambda: put_checked(self.objects, loaded.parts, loaded.fills, loaded.randomness))


def put_unchecked(objects: Mapping[str, Any], parts: Mapping[str, Any], undo: list[Callable[[], None]]) -> None:
    """Loads what objects are to load that are no modules and no optimizers. Adds to undo what puts them back."""
    for name, thing in objects.items():
        if name in parts and not isinstance(thing, CHECKED):
            try:
                undo.append(undo_of(thing))
            except StateError:  # what can be restored may stand where something is that cannot be saved
                log.debug("%s cannot be put back, should the restore fail", name)
            load_state(thing, parts[name])


def put_checked(
    objects: Mapping[str, Any],
    parts: Mapping[str, Any],
    fills: Sequence[tuple[Tensor, StoredTensor]],
    randomness: Mapping[str, Any] | None,
) -> None:
    """Loads what modules and optimizers are to load, model and optimizer last, and the global generators if given.

    fills: tensors of the model and the optimizer, which are filled before these load, and with what.
    """
    checked = [name for name, thing in objects.items() if name in parts and isinstance(thing, CHECKED)]
    last = [name for name in checked if name.partition(".")[0] in MAIN]
    for name in checked:
        if name not in last:
            load_state(objects[name], parts[name])
    fill(fills)
    for name in last:
        load_state(objects[name], parts[name])
    if randomness is not None:
        rng.set_state(dict(randomness))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for content in value.values():
            yield from _tensors_in(content)
    elif isinstance(value, list | tuple | set | frozenset):
        for content in value:
            yield from _tensors_in(content)
