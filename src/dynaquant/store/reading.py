"""Decodes tensors of a checkpoint from its file and the files of its ancestors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from dynaquant.engine.forms.form import Coded, StoredTensor, stored_equal
from dynaquant.engine.forms.registry import decode, decodes_to
from dynaquant.engine.forms.stored import in_one, stored_hash
from dynaquant.engine.tensors.dtypes import dtype_name, dtype_named
from dynaquant.errors import CheckpointError
from dynaquant.store import frozen_tensors, parts
from dynaquant.store.chain import detect_run_changes, name_step_in_errors, needed_entries
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.memory import explain_out_of_memory

Tensors = dict[str, StoredTensor]


def load_tensor(chain: list[CheckpointFile], name: str) -> StoredTensor:
    """Decode one tensor of a checkpoint, with the tensors that it depends on, and check it against its hash.

    chain: ``Run.chain`` of the checkpoint. Raises CheckpointError if the tensor is missing, or does not decode to the
    values that were stored.
    """
    if name not in chain[0].header.by_name:
        raise CheckpointError(f"{chain[0].path}: there is no tensor {name!r}")
    return load_tensors(chain, [name])[name]


def error_with_step(step: int, path: Path, text: str) -> CheckpointError:
    """Return a CheckpointError with ``text``, prefixed by the step unless the text names the checkpoint already."""
    itself = f"checkpoint step {step}: "
    return CheckpointError(text if text.startswith((itself, f"{path}: ")) else f"{itself}{text}")


def load_all(chain: list[CheckpointFile], names: Collection[str] | None = None) -> Tensors:
    """Decode the tensors of the first file of a chain and check each against its hash.

    names: of the tensors to decode, by default all.

    Raises CheckpointError, naming file and tensor, if a tensor cannot be decoded or has other values than were stored.
    """
    file = chain[0]
    with name_step_in_errors(file), detect_run_changes(chain):
        return load_tensors(chain, [entry.name for entry in file.header.entries] if names is None else names)


def load_tensors(
    chain: list[CheckpointFile],
    names: Collection[str],
    all_: bool = False,
    decoded: Mapping[str, StoredTensor] | None = None,
) -> Tensors:
    """Decode tensors of the first file of a chain, and of its ancestors as far as needed.

    Returns them in the order of ``names``. all_: also check ancestors against their hashes, to find the damaged file.
    decoded: tensors of the last file of the chain, decoded and checked before. That file is not read then.
    """
    known = decoded or {}
    files = chain if decoded is None else chain[:-1]
    needed = needed_entries(files, names)
    tensors = dict(known)
    for i, (file, entries) in reversed(list(enumerate(zip(files, needed, strict=False)))):
        parents, tensors = tensors, {}
        for entry in entries:
            tensors[entry.name] = decode_entry(file, entry, parents.get(entry.name), tensors)
            if entry.scheme.is_reference:
                check_reference(file, entry, chain[i + 1])
        for entry in entries if i == 0 or all_ else []:
            if tensors[entry.name] is known.get(entry.name):
                continue  # unchanged since it was checked
            if decoded_hash(file, entry, tensors[entry.name]) != entry.hash:
                if not all_:
                    load_tensors(chain, names, all_=True, decoded=decoded)
                raise CheckpointError(
                    f"{file.path}: tensor {entry.name} does not decode to the values that were stored"
                )
    return {name: tensors[name] for name in names}


def check_reference(file: CheckpointFile, entry: Entry, parent: CheckpointFile) -> None:
    """Raise CheckpointError if the parent's tensor is not the one that an entry refers to."""
    if parent.header.by_name[entry.name].hash != entry.hash:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is not the tensor of its parent that it refers to")


def decode_entry(
    file: CheckpointFile, entry: Entry, parent: StoredTensor | None, others: Mapping[str, StoredTensor]
) -> StoredTensor:
    """Decode one entry. parent: the tensor in the parent. others: tensors of the same file that are decoded already.

    Raises CheckpointError if it is damaged.
    """
    if entry.scheme.is_reference:
        assert parent is not None
        return parent
    if entry.scheme.layout_number is not None:
        return parts.decode_sharded(file, entry, parent, others, decode_entry)
    if entry.external:
        return frozen_tensors.external_tensor(file, entry)
    try:
        with explain_out_of_memory(file, entry):
            return decode(entry.scheme, _coded(file, entry, parent, others))
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


def _coded(
    file: CheckpointFile, entry: Entry, parent: StoredTensor | None, others: Mapping[str, StoredTensor]
) -> Coded:
    other = others.get(entry.scheme.depends_on or "")
    return Coded(dtype_named(entry.dtype), torch.Size(entry.shape), file.read(entry), in_one(parent), other)


def holds(
    file: CheckpointFile,
    entry: Entry,
    parent: StoredTensor | None,
    others: Mapping[str, StoredTensor],
    wanted: StoredTensor,
) -> bool:
    """Whether an entry decodes to this stored tensor, bit for bit. Raises CheckpointError if it is damaged.

    parent, others: as for ``decode_entry``.
    """
    if not entry.scheme.has_stream:
        return stored_equal(decode_entry(file, entry, parent, others), wanted)
    if (entry.dtype, entry.shape) != (dtype_name(wanted.dtype), wanted.shape):
        return False
    try:
        with explain_out_of_memory(file, entry):
            return decodes_to(entry.scheme, _coded(file, entry, parent, others), wanted)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


def decoded_hash(file: CheckpointFile, entry: Entry, stored: StoredTensor) -> str:
    """Return the hash of a decoded tensor. Raises CheckpointError if its parts do not fit together."""
    try:
        with explain_out_of_memory(file, entry):
            if entry.scheme.layout_number is not None:
                return parts.hash_of_boxes(file, entry, stored)
            return stored_hash(stored)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error
