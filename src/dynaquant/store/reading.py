"""Decodes tensors of a checkpoint, or boxes of them, from its file, its parts and the files of its ancestors.

A tensor is stored as one or several boxes. One box, the whole tensor, lies in the checkpoint's own file; others lie in
parts. A process reads only the boxes that overlap what it asks for, and of the ancestors what these are conditioned on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain as joined
from typing import TypeVar

from torch import Tensor

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import cut, form_of, values_of, values_with_hash
from dynaquant.engine.tensors.box import Box
from dynaquant.errors import CheckpointError
from dynaquant.garbage import collection_paused
from dynaquant.store.chain import detect_run_changes, name_step_in_errors, needed_entries
from dynaquant.store.container import CheckpointFile
from dynaquant.store.decoding import (
    StoredBox,
    WrongValuesError,
    check_reference,
    check_values,
    decode_entry,
    explain_damage,
    places_of,
    stored_boxes,
    wrong_values,
)
from dynaquant.store.entry import Entry
from dynaquant.store.layout import Place
from dynaquant.store.threads import in_order

T = TypeVar("T")
Tensors = dict[str, StoredTensor]


def load_tensor(chain: list[CheckpointFile], name: str) -> StoredTensor:
    """Decode one tensor of a checkpoint, with the tensors that it depends on, and check it against its hash.

    chain: ``Run.chain`` of the checkpoint. Raises CheckpointError if the tensor is missing, or does not decode to the
    values that were stored.
    """
    if name not in chain[0].header.by_name:
        raise CheckpointError(f"{chain[0].path}: there is no tensor {name!r}")
    return load_tensors(chain, [name])[name]


def load_all(chain: list[CheckpointFile], names: Collection[str] | None = None, threads: int = 1) -> Tensors:
    """Decode the tensors of the first file of a chain and check each against its hash.

    names: of the tensors to decode, by default all. threads: how many tensors are decoded at a time.

    Raises CheckpointError, naming file and tensor, if a tensor cannot be decoded or has other values than were stored.
    """
    file = chain[0]
    with name_step_in_errors(file), detect_run_changes(chain):
        return load_tensors(chain, file.header.by_name if names is None else names, threads=threads)


@collection_paused()
def load_values(chain: list[CheckpointFile], names: Collection[str] | None, threads: int) -> dict[str, Tensor]:
    """Return the values of what ``load_all`` returns, in less time: each value is computed once, and then hashed."""
    file = chain[0]
    with name_step_in_errors(file), detect_run_changes(chain):
        return _Reader(chain, threads=threads).read_values(file.header.by_name if names is None else names)


@collection_paused()
def load_tensors(
    chain: list[CheckpointFile],
    names: Collection[str],
    decoded: Mapping[str, StoredTensor] | None = None,
    threads: int = 1,
) -> Tensors:
    """Decode tensors of the first file of a chain, and of its ancestors as far as needed.

    Returns them in the order of ``names``. decoded: tensors of the last file of the chain, decoded and checked before.
    That file is not read then. threads: how many tensors are decoded at a time.
    """
    tensors = _Reader(chain, decoded, threads).read(dict.fromkeys(names))
    return {name: tensors[name] for name in names}


def load_boxes(
    chain: list[CheckpointFile], wanted: Iterable[tuple[str, list[Box]]]
) -> Iterator[tuple[str, list[StoredTensor]]]:
    """Yield boxes of the tensors of a checkpoint, each checked against its hash. Holds one tensor at a time.

    chain: ``Run.chain`` of the checkpoint. wanted: names of tensors, with boxes of each. Raises CheckpointError, naming
    file and tensor, if a tensor is missing, damaged, or does not have such a box.
    """
    file, reader = chain[0], _Reader(chain)
    with name_step_in_errors(file), detect_run_changes(chain):
        for name, boxes in wanted:
            entry = file.header.by_name.get(name)
            for box in boxes:
                if entry is None or not box.fits(entry.shape):
                    what = f"there is no tensor {name!r} with a box {box.offsets}, {box.sizes}"
                    raise CheckpointError(f"{file.path}: {what}")
            found = reader.read({name: boxes})[name] if boxes else None
            yield name, [] if found is None else [cut(found, box) for box in boxes]


_Wanted = Mapping[str, Sequence[Box] | None]
"""What is wanted of tensors, by name: boxes; None for the whole tensor."""
_WORTH_A_THREAD = 1 << 19
"""Elements of tensors that are decoded beside others. For smaller ones, threads wait for one another too long."""
_MOST_THREADS = 4
"""Each of these may use PyTorch's threads, too, to cast values."""


class _Reader:
    """Reads tensors of the first file of a chain. decoded, threads: as for ``load_tensors``."""

    def __init__(
        self, chain: list[CheckpointFile], decoded: Mapping[str, StoredTensor] | None = None, threads: int = 1
    ) -> None:
        self._chain, self._threads = chain if decoded is None else chain[:-1], threads
        self._files, self._decoded = chain, decoded or {}
        self._places: dict[tuple[int, int, tuple[Box, ...]], list[Place]] = {}  # tensors share layouts

    def read(self, wanted: _Wanted, all_: bool = False) -> Tensors:
        """Decode and check tensors. One of which boxes are wanted may have no others.

        all_: also check those of ancestors, to find the damaged file.
        """

        def checked(entry: Entry, tensor: StoredTensor, boxes: list[StoredBox]) -> StoredTensor:
            if tensor is not self._decoded.get(entry.name):  # otherwise it is unchanged since it was checked
                check_values(self._chain[0], entry, tensor, boxes)
            return tensor

        return self._read(wanted, checked, all_)

    def read_values(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the values of whole tensors, checked. Each is computed once, and then hashed."""
        file = self._chain[0]

        def values(entry: Entry, tensor: StoredTensor, boxes: list[StoredBox]) -> Tensor:
            with explain_damage(file, entry):
                if entry.scheme.layout_number is not None:  # each box has its hash
                    check_values(file, entry, tensor, boxes)
                    return values_of(tensor)
                found, digest = values_with_hash(tensor)
            if digest != entry.hash:
                raise wrong_values(file, entry)
            return found

        found = self._read(dict.fromkeys(names), values)
        return {name: found[name] for name in names}

    def _read(
        self, wanted: _Wanted, finish: Callable[[Entry, StoredTensor, list[StoredBox]], T], all_: bool = False
    ) -> dict[str, T]:
        """Decode tensors and return what ``finish``, which checks them, makes of each. all_: as for ``read``.

        A tensor goes through all files of the chain before the next one does, so that its levels stay in the caches.
        """
        if not self._chain:
            return {}
        needed = self._needed(wanted)

        def through_chain(group: list[str]) -> dict[str, T]:
            tensors: Tensors = {name: self._decoded[name] for name in group if name in self._decoded}
            for depth in reversed(range(len(needed))):
                boxes = {name: needed[depth][name] for name in group if name in needed[depth]}
                tensors = self._decoded_at(depth, boxes, tensors)
                for name in boxes if all_ and depth else ():
                    check_values(self._chain[depth], self._entry(depth, name), tensors[name], boxes[name])
            return {name: finish(self._entry(0, name), tensors[name], boxes[name]) for name in boxes}

        large: list[list[str]] = []
        small: list[list[str]] = []
        for group in self._groups(needed):
            elements = sum(math.prod(self._entry(0, name).shape) for name in group if name in needed[0])
            (large if elements >= _WORTH_A_THREAD else small).append(group)
        found: dict[str, T] = {}
        threads = min(self._threads, _MOST_THREADS)
        try:
            for part in joined(in_order(through_chain, large, threads), map(through_chain, small)):
                found |= part
        except WrongValuesError:
            if not all_:
                self.read(wanted, all_=True)
            raise
        return {name: found[name] for name in needed[0]}

    def _entry(self, depth: int, name: str) -> Entry:
        return self._chain[depth].header.by_name[name]

    def _groups(self, needed: list[dict[str, list[StoredBox]]]) -> list[list[str]]:
        """Return groups of tensors of which none depends on one of another group, in the order of the first file."""
        groups: dict[str, list[str]] = {}
        for depth, boxes in enumerate(needed):
            for name in boxes:
                own = groups.setdefault(name, [name])
                if (second := self._entry(depth, name).scheme.depends_on) is None:
                    continue
                other = groups.setdefault(second, [second])
                if other is not own:
                    shorter, longer = sorted((own, other), key=len)
                    longer += shorter
                    groups.update(dict.fromkeys(shorter, longer))
        return list({id(group): group for group in groups.values()}.values())

    def _decoded_at(self, depth: int, boxes: Mapping[str, list[StoredBox]], parents: Tensors) -> Tensors:
        """Decode boxes of a group in a file of the chain. parents: what was decoded of the file after it."""
        file, tensors = self._chain[depth], Tensors()
        # What a reference returns may be made of another of the parent's tensors.
        used = [
            other[1]
            for name in boxes
            if self._entry(depth, name).scheme.is_reference and name in parents
            if (other := form_of(parents[name]).other) is not None
        ]
        for name in sorted(boxes, key=lambda name: self._entry(depth, name).scheme.depends_on is not None):
            entry, parent = self._entry(depth, name), parents.get(name)
            # If nobody needs a parent that was decoded here any more, its levels become those of the child.
            needless = parent is not None and all(parent is not each for each in used)
            overwrite = needless and parent is not self._decoded.get(name)
            tensors[name] = decode_entry(file, entry, parent, tensors, boxes[name], overwrite)
            if entry.scheme.is_reference:
                check_reference(file, entry, self._files[depth + 1])
        return tensors

    def _needed(self, wanted: _Wanted) -> list[dict[str, list[StoredBox]]]:
        """Return, for each file that is needed, the boxes to decode there. A tensor comes after those it depends on."""
        found: list[dict[str, list[StoredBox]]] = []
        for depth, entries in enumerate(needed_entries(self._chain, wanted.keys())):
            asked, here = dict(wanted), dict[str, list[StoredBox]]()
            for entry in reversed(entries):
                if entry.name not in asked:
                    continue
                here[entry.name] = stored = self._stored(depth, entry, asked[entry.name])
                if (other := entry.scheme.depends_on) is not None:
                    before = asked.get(other, ())
                    in_parts = entry.scheme.layout_number is not None
                    own = [each.box for each in stored] if in_parts else None
                    asked[other] = None if before is None or own is None else [*before, *own]
            found.append({name: here[name] for name in reversed(here)})
            following: dict[str, Sequence[Box] | None] = {}
            for name, stored in here.items():
                needy = [each for each in stored if each.entry.needs_parent]
                if needy:
                    whole = needy[0].file is self._chain[depth]
                    following[name] = None if whole else [each.box for each in needy]
            wanted = following
        return found

    def _stored(self, depth: int, entry: Entry, boxes: Sequence[Box] | None) -> list[StoredBox]:
        """Return the stored boxes that overlap the wanted ones."""
        file = self._chain[depth]
        if (number := entry.scheme.layout_number) is None or boxes is None:
            return stored_boxes(file, entry)
        key = depth, number, tuple(boxes)
        if (places := self._places.get(key)) is None:
            whole = Box.whole(entry.shape)
            places = [
                place
                for place in places_of(file, entry)
                if any(box in (place.box, whole) or place.box.overlap(box) for box in boxes)
            ]
            self._places[key] = places
        return stored_boxes(file, entry, places)
