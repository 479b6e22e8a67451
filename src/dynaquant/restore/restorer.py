"""One restore: chooses a checkpoint, decodes it, checks that it fits, and loads all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import fill, form_of, values_of
from dynaquant.errors import CheckpointError
from dynaquant.ranks.dtensors import local_of, memory_of, reshard, with_local
from dynaquant.ranks.group import Group
from dynaquant.restore.dropped_moments import dropped_moments
from dynaquant.restore.fitting import MOST_IN_SHORT, fit_state, in_short, raise_if_any, selected_objects
from dynaquant.restore.in_place import fillable_tensors, new_tensor, unchanged_tensors, wanted_strides
from dynaquant.restore.load_shards import load_shards, sharded_targets
from dynaquant.restore.seen_by_rank import SeenByRank
from dynaquant.restore.stored_checkpoint import built_from, load_lossless_copy
from dynaquant.state.plain_objects import leaves
from dynaquant.store.container import CheckpointFile, Parent
from dynaquant.store.decoding import explain_out_of_memory
from dynaquant.store.files import raise_if_unavailable
from dynaquant.store.reading import Tensors
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag
from dynaquant.training import rng
from dynaquant.training.collect import collect_to_compare, stored_rng_state
from dynaquant.training.hash_cache import HashCache
from dynaquant.training.load_state import fill_in_omitted, load_state
from dynaquant.training.moment_correction import MomentCorrections
from dynaquant.training.objects import CHECKED, MAIN, RESERVED, models_of
from dynaquant.training.undo import Undo, loads_as_pytorch_does

log = logging.getLogger("dynaquant")

_ADVICE = (
    "Build the objects as they were when it was saved, use another folder for another training, restore what fits "
    "with restore(strict=False), or restore objects without differences with restore(only=…)."
)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was decoded and fits the objects.

    stored: what was decoded of its tensors, by stored name. tensors: those of this rank's state, by name, as its file
    stores them. states: what each object loads. Where a tensor of the model or the optimizer is filled in place, it
    holds that tensor itself. fills: these tensors, each with its stored form. rng_state: of the global random number
    generators, None if they are not restored. restored_names: names of the tensors that models and optimizers get.
    from_lossless_copy: whether the weights come from a lossless copy. moments: the tensors of the file that the values
    come from. problems: what does not fit and is left out.
    """

    file: CheckpointFile
    stored: Mapping[str, StoredTensor]
    tensors: Mapping[str, StoredTensor]
    states: Mapping[str, Any]
    fills: Sequence[tuple[Tensor, StoredTensor]]
    rng_state: Mapping[str, Any] | None
    restored_names: frozenset[str]
    from_lossless_copy: bool
    moments: Mapping[str, StoredTensor]
    problems: Sequence[str]

    @property
    def step(self) -> int:
        """The training step."""
        return self.file.header.step


@dataclass
class Restorer:
    """Restores a checkpoint of a run into the objects of a training.

    corrections: of first moments that the checkpoint does not keep. only: names of the objects to restore; None:
    everything. strict: whether an object that does not fit is an error; otherwise it is left out.
    """

    run: Run
    objects: Mapping[str, Any]
    group: Group
    hashes: HashCache
    corrections: MomentCorrections
    only: str | Collection[str] | None = None
    strict: bool = True
    skipped: list[CheckpointError] = field(default_factory=list)
    """Why checkpoints were skipped."""
    damaged: set[int] = field(default_factory=set)
    """The steps of skipped checkpoints."""

    def __post_init__(self) -> None:
        self._selected, self._with_rng_state = selected_objects(self.objects, self.only)
        self._with_copy = True  # whether lossless copies are read

    def restore(self, step: int | str | None) -> Loaded | None:
        """Restore the checkpoint of a step or a tag, or the newest that verifies. Returns None if there is none.

        Collective: all ranks restore the same checkpoint. Each decodes what it holds of the tensors. Nothing is changed
        on any rank before the checkpoint fits on every rank.
        """
        reshard(models_of(self.objects))
        loaded = self._choose(step)
        if loaded is None:
            return None
        self._load_into_objects(loaded)
        if self.group.rank == 0:
            log.info("restored step %d of %s", loaded.step, self.run.folder)
        self._correct_moments(loaded)
        if self.group.rank == 0 and (problems := loaded.problems):
            log.warning("restored step %d, but left out what does not fit, %s", loaded.step, in_short(problems))
            for problem in problems[MOST_IN_SHORT:]:
                log.info("left out: %s", problem)
        return loaded

    def _choose(self, step: int | str | None) -> Loaded | None:
        """Decode the requested checkpoint, or the newest that verifies on all ranks. Returns None for an empty run."""
        for candidate in self._candidates(step):
            file, missing = self.group.run_on_all_ranks(partial(self._open, candidate))
            self._check_same_on_all_ranks(file)
            loaded, error = self.group.run_on_all_ranks(partial(self._try, file, missing))
            if len(set(self.group.all_gather(loaded is not None and loaded.from_lossless_copy))) > 1:
                self._with_copy = False  # one rank cannot read it, so none does
                loaded, error = self.group.run_on_all_ranks(partial(self._try, file, missing))
            texts = self.group.all_gather(None if error is None else str(error))
            if not any(text is not None for text in texts):
                assert loaded is not None
                # A rank that holds nothing of a tensor cannot tell whether an object got it.
                loaded = replace(loaded, restored_names=self.group.from_rank_0(loaded.restored_names))
                for reason in self.skipped if self.group.rank == 0 else ():
                    log.warning("restored step %d; skipped %s", loaded.step, reason)
                return loaded
            error = error or CheckpointError(next(text for text in texts if text is not None))
            if step is not None:
                raise error
            self.skipped.append(error)
            self.damaged.add(candidate.step)
        if not any(self.group.all_gather(bool(self.skipped))):
            return None
        reasons = self.group.from_rank_0("\n  ".join(str(error) for error in self.skipped))
        raise CheckpointError(
            f"{self.run.folder}: no checkpoint of this run can be restored:\n  {reasons}\n"
            "Nothing was changed. The weights may be sound where another part is damaged, and can be read alone: "
            "dq.load(run, step, part='model'), dq.load_into(model, run, step) or 'dynaquant export RUN STEP'. To train "
            "from the beginning, use an empty folder."
        )

    def _candidates(self, step: int | str | None) -> list[Parent]:
        """Return the checkpoints to try, best first, as rank 0 finds them."""

        def found() -> list[Parent]:
            if step is not None:
                header = open_step_or_tag(self.run, step).header
                return [Parent(header.step, header.identity)]
            summaries, broken = self.run.summaries()
            for error in broken:  # it may be the newest
                raise_if_unavailable(error)
            self.skipped += broken
            return [Parent(summary.step, summary.identity) for summary in reversed(summaries)]

        return self.group.made_by_rank_0(found)

    def _open(self, candidate: Parent) -> tuple[CheckpointFile | None, CheckpointError | None]:
        """Open a checkpoint. Returns the error if it is missing or its header is damaged, and what is in its place."""
        try:
            return self.run.holding(candidate.step, candidate.identity), None
        except CheckpointError as error:
            raise_if_unavailable(error)
            with suppress(CheckpointError):
                return self.run.file(candidate.step), error
            return None, error

    def _check_same_on_all_ranks(self, file: CheckpointFile | None) -> None:
        """Raise CheckpointError if ranks have opened different checkpoints of one step. Collective."""
        identities = self.group.all_gather(None if file is None else file.header.identity)
        opened = {identity: rank for rank, identity in reversed(list(enumerate(identities))) if identity is not None}
        if len(opened) > 1:
            first, other, *_ = sorted(opened.values())
            raise CheckpointError(
                f"{self.run.folder}: rank {other} has opened another checkpoint than rank {first}: the ranks do not "
                "see the same folder. Nothing was changed. Give all ranks one folder on a file system that they share"
            )

    def _try(
        self, file: CheckpointFile | None, missing: CheckpointError | None
    ) -> tuple[Loaded | None, CheckpointError | None]:
        """Decode a checkpoint. Returns the error if it is damaged. missing: why it could not be opened."""
        if file is None or missing is not None:
            return None, missing
        try:
            return self._decode(file), None
        except CheckpointError as error:
            raise_if_unavailable(error)
            return None, error

    def _decode(self, file: CheckpointFile) -> Loaded:
        """Decode a checkpoint and compare it with the objects. Changes nothing."""
        now = collect_to_compare(self.objects)  # outside the try: if an object fails, the file is not damaged
        sharded = sharded_targets(now, self.objects, file.header)
        targets = sharded.tensors

        try:
            own = SeenByRank(file.header, self.group.rank, self.group.size, self.objects)
        except TypeError as error:
            raise CheckpointError(f"{file.path}: it holds no state of a training ({error!r})") from error

        def load(wanted: CheckpointFile) -> Tensors:
            return load_shards(self.run, wanted, targets, own.left_out)

        decoded = load(file)
        copy = load_lossless_copy(self.run, file, self.skipped, load) if self._with_copy else None
        source, decoded_here = copy or (file, decoded)
        stored = own.tensors(decoded_here)
        try:
            values, in_place = self._values(source, stored, own.tree, now, targets)
            state = self._state(source, values, own.tree, now)
            # Tensors that are filled in place do not have their values yet. Omitted ones are the present ones.
            hashes = {memory_of(value): own.hash_of(name, source.header) for name, value in values.items()}
            fit = fit_state(
                self.objects,
                now,
                state,
                self.group.rank,
                None if self.only is None else self._selected,
                lambda tensor: hashes.get(memory_of(tensor), ""),
            )
            fit.problems.extend(self._changed_omitted(source, values, targets))
            fit.problems.extend(sharded.problems(self._selected))
            advice = own.fit_number_of_ranks(fit, self._selected, state, decoded_here)
            if self.strict:
                raise_if_any(fit.problems, f"{file.path} (step {file.header.step})", advice + _ADVICE)
            rng_state = stored_rng_state(state, self.group.rank)
            if rng_state is not None and self._with_rng_state:
                rng.check(rng_state)
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file.path}: it holds no state of a training ({error!r})") from error
        self._log_notes(file, fit.notes, rng_state is not None)
        used = {memory_of(each) for each in leaves(fit.states) if isinstance(each, Tensor)}
        restored = frozenset(name for name, value in values.items() if memory_of(value) in used)
        return Loaded(
            file,
            decoded,
            own.tensors(decoded),
            fit.states,
            [(local_of(target), stored[name]) for name, target in in_place.items() if name in restored],
            rng_state if self._with_rng_state else None,
            restored,
            source is not file,
            stored,
            fit.problems,
        )

    def _values(
        self,
        source: CheckpointFile,
        stored: Mapping[str, StoredTensor],
        tree: Any,
        now: Mapping[str, Any],
        targets: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that are not omitted, and those among them that are filled in place later."""
        omitted = _omitted(source)
        unchanged = unchanged_tensors(now, stored, self.hashes)
        to_load = {name: tensor for name, tensor in stored.items() if name not in unchanged and name not in omitted}
        strides = wanted_strides(tree, to_load, self.objects, targets)
        in_place = fillable_tensors(now, tree, to_load, targets, strides)
        with explain_out_of_memory(source, *source.header.entries):
            values = {
                name: in_place[name] if name in in_place else new_tensor(tensor, strides.get(name))
                for name, tensor in to_load.items()
            }
            for name in targets.keys() & values.keys() - in_place.keys():
                values[name] = with_local(targets[name], values[name].to(targets[name].device))
            for name in in_place:
                if form_of(stored[name]).external:
                    values_of(stored[name])  # raises while nothing has been changed
        return {**values, **unchanged}, in_place

    def _state(
        self, source: CheckpointFile, values: dict[str, Tensor], tree: Any, now: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the stored state with these tensors. For omitted tensors it has the objects' own."""
        state = built_from(source, tree, values, stored_strides=False)
        if not isinstance(state, dict):
            raise TypeError(f"its state is a {type(state).__name__}")
        fill_in_omitted(now, state, _omitted(source))
        if missing := set(RESERVED) - set(state):
            raise KeyError(*missing)
        return state

    def _changed_omitted(
        self, source: CheckpointFile, values: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> list[str]:
        """Return a problem for each omitted tensor whose present values differ from those at the save."""
        restored = tuple(f"{name}." for name in self._selected)
        names = sorted(name for name in _omitted(source) if name not in values and name.startswith(restored))
        what = "its values in the model differ; load the same base model first"
        sharded = "values of a sharded tensor cannot be compared; restore it without sharding, and save it as 'exact'"
        return [f"{name} is not stored (role 'omit'), and {sharded if name in targets else what}" for name in names]

    def _log_notes(self, file: CheckpointFile, notes: Iterable[str], has_rng_state: bool) -> None:
        if not has_rng_state:
            log.warning(
                "%s was saved by fewer ranks: rank %d keeps the present state of its random number generators",
                file.path,
                self.group.rank,
            )
        if self.group.rank == 0:
            for note in notes:
                log.warning("step %d: %s", file.header.step, note)

    def _load_into_objects(self, loaded: Loaded) -> None:
        """Load everything, or put everything back: the code of any object may fail, or a signal interrupt it.

        Where only PyTorch's own code loads models and optimizers, what fits does not fail, and a copy of their tensors
        would double the memory. So after an interrupt there, the restore is completed before the interrupt goes on.
        """
        objects = {name: self.objects[name] for name in self.objects if name in loaded.states}
        last = {n: thing for n, thing in objects.items() if isinstance(thing, CHECKED) and n.partition(".")[0] in MAIN}
        completes = all(loads_as_pytorch_does(thing) for thing in last.values())
        filled = [memory_of(target) for target, _ in loaded.fills] if completes else []
        undo = self.group.run_on_all_ranks(lambda: Undo(objects.values(), filled))
        try:
            extras = {name: thing for name, thing in objects.items() if name not in last}
            self.group.run_on_all_ranks(lambda: _load_states(extras, loaded.states))
        except BaseException:
            undo.put_back()
            raise
        load = partial(load_objects, last, loaded.states, loaded.fills, loaded.rng_state)
        try:
            self.group.run_on_all_ranks(load)
        except BaseException:
            load() if completes else undo.put_back()
            raise

    def _correct_moments(self, loaded: Loaded) -> None:
        """Let the next steps correct the first moments that the checkpoint does not keep."""
        dropped = dropped_moments(self.objects, loaded.moments, loaded.restored_names, self.group)
        restored = [name for name in dropped if name in loaded.states]
        for name in restored:
            self.corrections.begin(name, self.objects[name], dropped[name])
        if restored and self.group.rank == 0:
            for note in self.corrections.notes:
                log.warning("step %d: %s", loaded.step, note)
            if self.corrections.count:
                log.info(
                    "step %d holds no first moments of %d parameters: the next steps correct their bias",
                    loaded.step,
                    self.corrections.count,
                )


def _omitted(source: CheckpointFile) -> set[str]:
    return {entry.name for entry in source.header.entries if entry.omitted}


def _load_states(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name, thing in objects.items():
        load_state(thing, states[name])


def load_objects(
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    fills: Sequence[tuple[Tensor, StoredTensor]],
    rng_state: Mapping[str, Any] | None,
) -> None:
    """Load models and optimizers, then the global generators if given.

    fills: tensors of the models and optimizers that are filled in place before these load.
    """
    for target, stored in fills:
        fill(target, stored)
    _load_states(objects, states)
    if rng_state is not None:
        rng.set_state(dict(rng_state))
