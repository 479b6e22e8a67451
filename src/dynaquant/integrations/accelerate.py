"""Makes ``save_state`` and ``load_state`` of an Accelerator write to a run of dynaquant, and read from it.

    from dynaquant.integrations.accelerate import attach

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    attach(accelerator, "runs/gpt", evaluate=validation_loss)

Hooks of Accelerate can keep it from writing the weights, but not the optimizer, nor anything that is sharded. So the
two methods are replaced on this one object. A folder that ``save_state`` makes holds one small file, which names a step
of the run and the identity of its checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dynaquant.checkpointer import Checkpointer
from dynaquant.errors import CheckpointError, MissingPackageError, StateError
from dynaquant.integrations.shared import check_version, free_step, unsupported
from dynaquant.options import split_values
from dynaquant.state.tree import dict_items
from dynaquant.state.wrappers import bare
from dynaquant.store.atomic_files import atomic_folder
from dynaquant.store.files import user_path
from dynaquant.store.pointers import POINTER_FILE, Pointer, found_at, write_pointer
from dynaquant.store.run import Run

try:
    import accelerate
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.utils import RNG_STATE_NAME, broadcast_object_list
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise MissingPackageError("dynaquant.integrations.accelerate", "accelerate", "accelerate") from None

from torch.utils.data import RandomSampler

log = logging.getLogger("dynaquant")
CHECKPOINTS = "checkpoints"
"""Where Accelerate's automatic names are, in ``project_dir``."""
_NUMBERED = re.compile(r"checkpoint_([0-9]+)")
_LOADER = re.compile(r"loader(_[0-9]+)?")
"""Names of the extras of stateful data loaders."""


def attach(accelerator: Any, folder: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """Make ``accelerator.save_state`` and ``accelerator.load_state`` use a run. Returns its ``Checkpointer``.

    Call it after ``prepare`` and ``register_for_checkpointing``, on all ranks. Saved are the prepared models,
    optimizers and schedulers, the GradScaler, registered objects, the positions of stateful data loaders, the seeds of
    samplers, and all random number generators.

    accelerator: an ``accelerate.Accelerator``. folder: of the run. options: all arguments of ``Checkpointer`` but
    ``model`` and ``optimizer``. ``extras`` are saved beside what the accelerator has. With automatic checkpoint naming,
    a ``keep`` without ``last`` gets ``total_limit``. A step is the number of optimizer steps, or the next that the run
    does not have.

    Raises ValueError if nothing is prepared yet, or if the accelerator has been attached before; DynaquantError for
    DeepSpeed and Megatron-LM, and if the installed Accelerate has changed in a way that matters here; all errors of
    ``Checkpointer``.
    """
    return _Attached(accelerator, user_path(folder), options).checkpointer


class _Attached:
    """An accelerator and its run."""

    def __init__(self, accelerator: Any, folder: Path, options: Mapping[str, Any]) -> None:
        _check(accelerator)
        self._accelerator, self._run = accelerator, Run(folder)
        self._prepared = _prepared(accelerator)
        self._counted = _Counted(accelerator)
        self._original_load: Callable[..., None] = accelerator.load_state
        configuration = accelerator.project_configuration
        values, others = split_values("attach", options)
        keep = values.keep
        if configuration.automatic_checkpoint_naming and keep.last is None:
            keep = replace(keep, last=configuration.total_limit)
        extras = {**self._extras(), **(others.pop("extras", None) or {})}
        models, optimizers = _one_or_several(accelerator._models), _one_or_several(accelerator._optimizers)
        self.checkpointer = Checkpointer(
            folder, models, optimizers, extras=extras, quality=values.quality, every=values.every, keep=keep, **others
        )
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state

    def _extras(self) -> dict[str, Any]:
        accelerator = self._accelerator
        scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
        loaders = [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]
        return {
            "accelerator": self._counted,
            **scaler,
            **_numbered("scheduler", accelerator._schedulers),
            **_numbered("loader", loaders),
            **_numbered("registered", accelerator._custom_objects),
        }

    # Saving

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *_: Any, **__: Any) -> Path:
        """Save the state as a step of the run. Returns the folder that stands for it, as Accelerate does.

        Returns when the checkpoint is committed. Arguments about the form of Accelerate's own files have no effect.

        Raises ValueError without a folder, or if an automatically named one exists; RuntimeError if more objects were
        prepared or registered since ``attach``; all errors of ``Checkpointer.save`` and of its writing.
        """
        accelerator, configuration = self._accelerator, self._accelerator.project_configuration
        if [id(thing) for thing in _prepared(accelerator)] != [id(thing) for thing in self._prepared]:
            raise RuntimeError(
                "objects were prepared, registered or released since dynaquant was attached to the accelerator, and "
                "would not be saved; call attach after prepare and register_for_checkpointing"
            )
        folder = self._folder_to_save(output_dir)
        self._call_hooks(folder)
        step = self._free_step()
        before = self._run.summaries()[0] if accelerator.is_main_process else []
        self.checkpointer.save(step).result()
        if accelerator.is_main_process:
            _stand_for(folder, self._run, step)
            if configuration.automatic_checkpoint_naming:
                deleted = {(each.step, each.identity) for each in before if not self._run.path(each.step).exists()}
                self._delete_pointers(folder.parent, deleted)
        if configuration.automatic_checkpoint_naming:
            configuration.iteration += 1
        accelerator.wait_for_everyone()
        return folder

    def _free_step(self) -> int:
        """Return the number of optimizer steps, or the next step that the run does not have. Collective."""
        steps = [free_step(self._run, self._counted.steps)]
        broadcast_object_list(steps)  # rank 0 writes; others may not see its folder
        return steps[0]

    def _folder_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        accelerator = self._accelerator
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
            return Path(output_dir).expanduser()
        folder = Path(accelerator.project_dir) / CHECKPOINTS / f"checkpoint_{accelerator.save_iteration}"
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} exists already; call accelerator.load_state() to go on from the last checkpoint, or delete "
                f"{folder.parent} and {self._run.folder} to begin anew"
            )
        accelerator.wait_for_everyone()  # no rank makes the folder before all have looked
        return folder

    def _call_hooks(self, folder: Path) -> None:
        """Call the hooks that the user has registered, with what Accelerate gives them."""
        accelerator = self._accelerator
        hooks = list(accelerator._save_model_state_pre_hook.values())
        if hooks:
            folder.mkdir(parents=True, exist_ok=True)
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in accelerator._models]
            for hook in hooks:
                hook(accelerator._models, weights, os.fspath(folder))

    def _delete_pointers(self, checkpoints: Path, deleted: Collection[tuple[int, str]]) -> None:
        """Delete automatically named folders that stand for deleted checkpoints, given by step and identity."""
        for folder in _numbered_folders(checkpoints, POINTER_FILE) if deleted else []:
            with suppress(CheckpointError, OSError):  # a damaged pointer, or a folder that is not empty
                pointer = _pointer_in(folder)
                if (pointer.step, pointer.identity) in deleted and self._is_of_run(pointer):
                    (folder / POINTER_FILE).unlink()
                    folder.rmdir()  # if no files of others are in it

    # Loading

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **options: Any) -> None:
        """Restore the state that was saved to a folder; without a folder, the last one that verifies.

        Folders with Accelerate's own files are left to Accelerate.

        Raises CheckpointError if the checkpoint is no longer in the run, or damaged; ValueError if it belongs to
        another run, if the folder is a run or does not exist, or if there is none; StateError if the checkpoint does
        not fit.
        """
        configuration = self._accelerator.project_configuration
        automatic = configuration.automatic_checkpoint_naming
        checkpoints = Path(self._accelerator.project_dir) / CHECKPOINTS if automatic else Path()
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            if (folder / POINTER_FILE).exists():
                self._restore(folder)
            else:
                self._load_foreign(folder, *args, **options)
        elif folders := _numbered_folders(checkpoints, POINTER_FILE) if automatic else []:
            self._restore_newest(folders)
        else:
            self._original_load(None, *args, **options)  # Accelerate's own files, or its own error
            self._counted.recount()
        if automatic and (folders := _numbered_folders(checkpoints)):
            configuration.iteration = _number(folders[-1]) + 1

    def _load_foreign(self, folder: Path, *args: Any, **options: Any) -> None:
        if folder.is_dir() and not any(folder.glob(f"{RNG_STATE_NAME}_*.pkl")):
            if folder.samefile(self._run.folder) or Run(folder).steps():
                raise ValueError(
                    f"{folder} is a run, which holds many checkpoints; load_state takes a folder that save_state made, "
                    "which stands for one of them"
                )
            raise CheckpointError(
                f"{folder} has no {POINTER_FILE} and no checkpoint of Accelerate: the save into it was interrupted, or "
                "its files were deleted; load another folder"
            )
        self._original_load(os.fspath(folder), *args, **options)
        self._counted.recount()

    def _restore_newest(self, folders: list[Path]) -> None:
        """Restore from the last folder whose checkpoint verifies. A warning names the others."""
        for folder in reversed(folders):
            try:
                self._restore(folder)
                return
            except CheckpointError as error:
                if folder == folders[0]:
                    raise
                log.warning("%s is skipped: %s", folder, error)

    def _restore(self, folder: Path) -> None:
        """Restore the checkpoint that a folder stands for. Collective."""
        self.checkpointer.wait()
        pointer = _pointer_in(folder)
        if not self._is_of_run(pointer):
            raise ValueError(
                f"{folder} belongs to the run {pointer.run.resolve()}, and this accelerator is attached to "
                f"{self._run.folder.resolve()}; attach it to that run, or begin with its checkpoint: dynaquant branch "
                f"{pointer.run.resolve()} {pointer.step} FOLDER"
            )
        identities = {summary.step: summary.identity for summary in self._run.summaries()[0]}
        if identities.get(pointer.step, pointer.identity) != pointer.identity:
            raise CheckpointError(
                f"{folder}: step {pointer.step} of {self._run.folder} was saved again since; load another folder"
            )
        for hook in list(self._accelerator._load_model_state_pre_hook.values()):
            hook([*self._accelerator._models], os.fspath(folder))
        try:
            self.checkpointer.restore(pointer.step)
        except StateError as error:
            now = sorted(name for name in self._extras() if _LOADER.fullmatch(name))
            stored = sorted(key for key, _ in dict_items(pointer.file().header.tree) if _LOADER.fullmatch(key))
            if now != stored:
                error.add_note(
                    "An extra 'loader' is the position of a prepared data loader: prepare as many as at the save, with "
                    "the same DataLoaderConfiguration(use_stateful_dataloader=…)"
                )
            raise

    def _is_of_run(self, pointer: Pointer) -> bool:
        return pointer.run.samefile(self._run.folder)


class _Counted:
    """What an accelerator counts, as an extra: optimizer steps, accumulated batches, epochs and seeds of samplers."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._counts = [0] * len(accelerator._optimizers)
        for number, optimizer in enumerate(accelerator._optimizers):
            bare(optimizer).register_step_post_hook(partial(self._count, number))

    def _count(self, number: int, *_: Any) -> None:
        self._counts[number] += 1

    @property
    def steps(self) -> int:
        """The steps of the optimizer that has made the most. Steps that a GradScaler skips do not count."""
        return max(self._counts)

    def recount(self) -> None:
        """Count the steps in the states of the optimizers, which Accelerate has just loaded from its own files."""
        for number, optimizer in enumerate(self._accelerator._optimizers):
            steps = [int(state["step"]) for state in bare(optimizer).state.values() if "step" in state]
            self._counts[number] = max([self._counts[number], *steps])

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted, as plain values."""
        return {
            "counts": list(self._counts),
            "step": self._accelerator.step,
            "loaders": [_epoch_and_seed(loader) for loader in self._accelerator._dataloaders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what was counted. With other data loaders than before, these stay as they are."""
        self._counts[:] = state["counts"]
        self._accelerator.step = state["step"]
        loaders = self._accelerator._dataloaders
        if len(loaders) != len(state["loaders"]):
            return
        for loader, stored in zip(loaders, state["loaders"], strict=True):
            loader.iteration = stored["epoch"]
            if stored["seed"] is not None and (sampler := _seedable(loader)) is not None:
                sampler.initial_seed = stored["seed"]


def _check(accelerator: Any) -> None:
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__qualname__}")
    check_version("accelerate")
    kind = accelerator.distributed_type
    if kind in (accelerate.DistributedType.DEEPSPEED, accelerate.DistributedType.MEGATRON_LM):
        raise unsupported(kind.value)
    if "save_state" in vars(accelerator):
        raise ValueError("dynaquant is attached to this accelerator already; one accelerator saves to one run")
    if not accelerator._models or not accelerator._optimizers:
        raise ValueError("nothing is prepared yet; call attach after accelerator.prepare(model, optimizer, …)")
    for number, loader in enumerate(accelerator._dataloaders):
        if isinstance(loader.get_sampler(), RandomSampler) and _seedable(loader) is None:
            log.warning(
                "the prepared data loader %d shuffles by random numbers that cannot be drawn again, so a resumed "
                "training sees batches in another order; set DataLoaderConfiguration(use_seedable_sampler=True)",
                number,
            )


def _prepared(accelerator: Any) -> list[Any]:
    """Return all objects whose state is saved."""
    kinds = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
    return [thing for kind in kinds for thing in getattr(accelerator, kind)]


def _one_or_several(things: list[Any]) -> Any:
    return things[0] if len(things) == 1 else {str(number): thing for number, thing in enumerate(things)}


def _numbered(name: str, things: list[Any]) -> dict[str, Any]:
    """Return things by name, as Accelerate numbers its files: scheduler, scheduler_1, …"""
    return {name if number == 0 else f"{name}_{number}": thing for number, thing in enumerate(things)}


def _seedable(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler()
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _epoch_and_seed(loader: Any) -> dict[str, int | None]:
    sampler = _seedable(loader)
    return {"epoch": loader.iteration, "seed": None if sampler is None else sampler.initial_seed}


# Folders that stand for checkpoints


def _stand_for(folder: Path, run: Run, step: int) -> None:
    """Make a folder stand for a checkpoint. If the process is killed, the folder is as before, or is not there."""
    file = run.file(step)
    if folder.is_dir() and any(folder.iterdir()):
        write_pointer(folder / POINTER_FILE, file)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as temporary:
            write_pointer(temporary / POINTER_FILE, file)


def _pointer_in(folder: Path) -> Pointer:
    """Return what a folder stands for. Raises CheckpointError if its pointer is damaged, or if the run is not there."""
    found = found_at(folder)
    assert isinstance(found, Pointer)
    return found


def _numbered_folders(checkpoints: Path, file: str = "*") -> list[Path]:
    """Return the folders with automatic names in which there is such a file, in the order of their numbers."""
    found = {path.parent for path in checkpoints.glob(f"*/{file}") if _NUMBERED.fullmatch(path.parent.name)}
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
