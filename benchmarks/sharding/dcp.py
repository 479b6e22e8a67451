"""Checkpoints by ``torch.distributed.checkpoint``, with and without its zstd extension."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from sharding.gpt import Work
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state


def save(work: Work, folder: Path, zstd: bool = False) -> None:
    """Save model, optimizer and scheduler. Collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(folder, _extensions=[ZStandard()] if zstd else None)
        save_state(_state(work), storage_writer=writer)


def load(work: Work, folder: Path) -> None:
    """Load what ``save`` has saved, by any number of ranks. Collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = _state(work)
        load_state(state, checkpoint_id=folder)
        set_state_dict(work.model, work.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        work.scheduler.load_state_dict(state["scheduler"])


def _state(work: Work) -> dict[str, Any]:
    model, optimizer = get_state_dict(work.model, work.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": work.scheduler.state_dict()}
