"""``save``: any state to one file, in a small fraction of its size."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO, Unpack

from dynaquant import _native
from dynaquant.errors import CheckpointError
from dynaquant.interop.packing import Metric, Packer
from dynaquant.interop.whole_state import WholeState
from dynaquant.options import Deprecated, Quality, QualityName, options_of
from dynaquant.restore.stored_checkpoint import Parents, PathOrFile, StoredCheckpoint
from dynaquant.saving.memory import Memory
from dynaquant.saving.record import Record, record_of
from dynaquant.state.flatten import flatten_whole
from dynaquant.store.files import check_output, user_path
from dynaquant.store.run import is_of_run
from dynaquant.store.single_file import write_file, write_in_memory
from dynaquant.store.writing import Base


def save(
    state: Any,
    path: PathOrFile,
    *,
    quality: QualityName | Quality = "balanced",
    metric: Metric | None = None,
    higher_is_better: bool = False,
    parent: Parents | None = None,
    **deprecated: Unpack[Deprecated],
) -> Record:
    """Save a state to one file, from which ``load`` returns it. Returns the record of the save.

    - ``state``: any nesting of dictionaries, lists, tuples, sets, tensors, arrays and plain values. Floating-point
      tensors are quantized in two places: in dictionaries that hold only tensors, such as a module's ``state_dict()``,
      and as moments in the ``state_dict()`` of an optimizer. All others are stored exactly. So a dictionary of data,
      histories, buffers or frozen weights is quantized, too, if it holds only tensors. Exact are a tensor in a list,
      one beside a value that is no tensor, a scalar, an array, and ``running_mean``, ``running_var`` and ``inv_freq``.
    - ``path``: of the file, or a binary file object. A file at a path is written atomically.
    - ``quality``: ``"high"``, ``"balanced"`` or ``"small"``: the metric may be worse by 0.1 %, 1 % or 5 %, or by what
      ``Quality(…, max_degradation=…)`` says. It may name a ``method`` or ``configuration``, too. ``"lossless"`` stores
      every bit. ``"balanced"`` and ``"small"`` drop the first moments of optimizers (also the momentum of SGD):
      ``load`` returns zeros, and nothing corrects the first steps. The other two keep them.
    - ``metric``: a function of the state, as ``load`` would return it, that returns a number. The file gets the most
      compact configuration that is good enough. Without a metric, an estimate from the weights' changes decides.
      (``evaluate`` of a ``Checkpointer`` means the same, but gets the model, with candidates as its weights.)
    - ``higher_is_better``: whether a higher metric is better.
    - ``parent``: an earlier file of ``save`` or ``dynaquant compress``, not of a run, on which this one is conditioned,
      so that it is smaller. It can be loaded only as long as its parent is there: the file names it by its path from
      its own folder. If either is a file object, ``load`` must be given the parent. If the parent has a parent that it
      cannot find, give a list of all of them.
    - ``deprecated``: ``max_degradation`` instead of ``quality=Quality(max_degradation=…)``.

    It does not communicate: in a training of several ranks, call it on one.

    The file is read back and compared before it has its name, or before it is written to a file object.

    Raises StateError, naming the place, for a value that cannot be stored, also for a DTensor or another part of a
    tensor; EvaluateError if the metric fails on the state itself; CheckpointError if the path or the parent cannot be
    used; ValueError for arguments that are out of range or exclude each other; TypeError if ``path`` is neither a path
    nor a file to write to, or ``parent`` neither a path nor a file to read; OSError if the file cannot be written. Then
    nothing is written, and a file that was there stays.
    """
    chosen = options_of("save", deprecated, quality, takes=("max_degradation",), also=("method", "configuration"))
    out = user_path(path) if isinstance(path, str | os.PathLike) else None
    if out is not None:
        if os.fspath(path).endswith(os.sep):  # type: ignore[arg-type]
            raise CheckpointError(f"{path} ends like a folder; give the name of a file")
        check_output(out)
    else:
        _check_writable(path)
    packer = Packer(chosen.quality, metric, higher_is_better)
    before = None if parent is None else _opened_parent(parent, out)
    memory, base = Memory(), None
    if before is not None:
        base = Base.from_loaded(before.file.header, before.with_retries(before.stored))
        memory = memory.following(before.file.header, base.tensors)
    checkpoint = packer.packed(WholeState("torch", *flatten_whole(state), {}), 0, memory).checkpoint
    parent_file, threads = None if before is None else before.file, _native.threads()
    if out is not None:
        return record_of(write_file(out, checkpoint, parent_file, base, threads))
    written = write_in_memory(checkpoint, parent_file, base, threads)
    _write(path, written.read_all())  # type: ignore[arg-type]
    return record_of(written)


def _check_writable(file: Any) -> None:
    """Raise TypeError unless bytes can be written to an object: before the work, not after it."""
    try:
        file.write(b"")
    except (AttributeError, TypeError, io.UnsupportedOperation):
        raise TypeError(f"give a path or a file object that is open for writing bytes, not {file!r}") from None


def _write(file: BinaryIO, content: bytes) -> None:
    """Write all of the content. A file without a buffer may take less at a time."""
    if not isinstance(file, io.RawIOBase):
        file.write(content)
        return
    rest = memoryview(content)
    while rest:
        count = file.write(rest)
        if count is None:
            raise BlockingIOError(f"{file!r} takes no bytes now; open it so that it waits, or with a buffer")
        rest = rest[count:]


def _opened_parent(parent: Parents, out: Path | None) -> StoredCheckpoint:
    """Open the file of a parent, and its own parents. Raises CheckpointError if it cannot be a parent."""
    given = parent if isinstance(parent, list | tuple) else [parent]
    if not given:
        raise ValueError("parent is an empty list; leave it out, or give the file of an earlier save")
    for each in given:
        if not isinstance(each, str | os.PathLike) and not hasattr(each, "read"):
            raise TypeError(
                "parent must be the path of an earlier file, a file object open for reading bytes, or a list of "
                f"these, not {each!r}"
            )
    own, *others = given
    found = StoredCheckpoint(own, parents=others)
    if of_run := next((file for file in found.chain if is_of_run(file)), None):
        raise CheckpointError(
            f"{of_run.path} is a checkpoint of a run, which may delete it; give a file of dynaquant.save or dynaquant "
            "compress, e.g. that of dynaquant.save(dynaquant.load(…), 'parent.dqc', quality='lossless')"
        )
    if out is not None and any(file.is_at(out) and not file.in_memory for file in found.chain):
        raise CheckpointError(f"{out} would replace a file that it is conditioned on; give another path")
    return found
