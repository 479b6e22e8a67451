"""Asynchronous checkpoint managers as peers: training goes on while they write.

- moonclip 0.3.1 (https://github.com/JHNMACHINE/moonclip): XOR with the last full checkpoint, byte planes and zstd, per
  tensor. ``save`` returns when it has copied the state; a thread does the rest. It has its defaults.
- torch_checkpointing 0.1.1 (https://github.com/meta-pytorch/torch_checkpointing): a thread copies the state into shared
  memory, another process writes it, without compression. ``save`` returns before the copy is done: a forward and a
  backward pass may run, but weights may not change. ``lock`` waits for the copy, as its documentation asks before
  ``optimizer.step``. It has its defaults but for direct I/O, with which 0.1.1 fails as it closes a file (EINVAL on
  ext4). Its files get the fsync that those of all others have.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from synthetic import named_tensors
from torch import nn
from torch.optim import Optimizer

Wait = Callable[[], object]


@dataclass(frozen=True)
class Session:
    """A method at work.

    save: returns when training may go on; its result waits until the checkpoint is on the disk. close: ends saving.
    restore: of a step, as after a crash; the session must be closed.
    """

    save: Callable[[int], Wait]
    close: Callable[[], object]
    restore: Callable[[int], object]


@dataclass(frozen=True)
class Manager:
    """open: takes an empty folder, model, optimizer and number of threads. package: must be installed."""

    open: Callable[[Path, nn.Module, Optimizer, int], Session]
    package: str

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def _moonclip(folder: Path, model: nn.Module, optimizer: Optimizer, threads: int) -> Session:
    os.environ["MOONCLIP_THREADS"] = str(threads)  # read when its first manager is made
    from moonclip import CheckpointManager  # noqa: PLC0415

    writing = [CheckpointManager(str(folder), world_size=1, rank=0)]

    def save(step: int) -> Wait:
        writing[0].save(step, model=model, optimizer=optimizer)
        return wait

    def wait() -> None:
        writing[0].flush()

    def close() -> None:  # it has no ``close``: its thread and its memory end with its last reference
        writing.pop().flush()

    def restore(step: int) -> None:
        reading = CheckpointManager(str(folder), world_size=1, rank=0)
        found = next(snapshot["id"] for snapshot in reading.list_snapshots() if snapshot["step"] == step)
        reading.load(found, model=model, optimizer=optimizer)

    return Session(save, close, restore)


def _torch_checkpointing(folder: Path, model: nn.Module, optimizer: Optimizer, threads: int) -> Session:
    from torch_checkpointing import CheckpointManager  # noqa: PLC0415
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # noqa: PLC0415
    from torch_checkpointing.config import (  # noqa: PLC0415
        AsyncCheckpointSaverConfig,
        SyncCheckpointSaverConfig,
    )
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: PLC0415

    buffered = LocalFileSystemStorageConfig(use_direct_io=False)
    saving = AsyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=threads))
    writing = CheckpointManager(CheckpointManager.Config(save=saving, storage_config=buffered))

    def save(step: int) -> Wait:
        written = writing.save(str(folder / str(step)), {"state": named_tensors(model, optimizer)})
        assert written is not None  # only a synchronous manager returns None

        def wait() -> None:
            written.result()
            _sync(folder / str(step))

        with writing.lock():
            return wait

    def restore(step: int) -> None:
        reading = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=buffered))
        reading.load(str(folder / str(step)), into={"state": named_tensors(model, optimizer)})
        reading.close()

    return Session(save, writing.close, restore)


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


MANAGERS = {
    "moonclip": Manager(_moonclip, "moonclip"),
    "torch_checkpointing": Manager(_torch_checkpointing, "torch_checkpointing"),
}
"""Managers by name."""
