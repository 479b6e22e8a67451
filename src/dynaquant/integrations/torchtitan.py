"""A checkpoint manager of torchtitan that saves to a run.

In a config function: ``checkpoint=CheckpointManager.Config(enable=True, interval=500)``.
"""

from __future__ import annotations

import copy
import os
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any

from torch import nn
from torchtitan.components.checkpointer import CheckpointManager as TitanManager
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from tyro.constructors import PrimitiveConstructorSpec

from dynaquant.checkpointer import Checkpointer
from dynaquant.errors import DynaquantError, StateError
from dynaquant.integrations.shared import TESTED, check_version
from dynaquant.options import Keep, Quality, QualityName, options_of
from dynaquant.ranks.group import Group
from dynaquant.state import wrappers


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan's classes are untyped to mypy
    """Saves a training of torchtitan to the run ``<dump_folder>/<folder>``, and resumes it from there.

    Saved are the model, the optimizers, the learning rate schedulers, the position of each rank's data loader, the
    step, the number of tokens seen, and the random number generators of each rank. If torchtitan's validator is
    enabled, its loss is the metric of the search. A checkpoint can be restored on another number of ranks, if
    ``exclude_from_loading=["dataloader"]`` leaves out the positions of the data loaders.

    Raises DynaquantError for versions and options of torchtitan that are not supported, and for pipeline parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Options of torchtitan's checkpoint managers, and some of ``Checkpointer``."""

        quality: Annotated[QualityName | Quality, _ON_COMMAND_LINE] = "balanced"
        """How much quality may be lost: a preset, or a ``dynaquant.Quality``. On the command line, fields follow the
        preset: ``--checkpoint.quality high max_degradation=0.002``. "lossless" needs no validator."""

        max_degradation: float | None = None
        """Deprecated: a field of ``quality``."""

        training_budget: float | None = None
        """Deprecated: a field of ``quality``."""

        expected_restores: int | None = None
        """Deprecated: a field of ``quality``."""

        last_save_model_only: bool = False
        """Must be False: the last checkpoint holds the whole state. ``dynaquant export`` writes the weights alone."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = False  # while this is not complete: torchtitan closes a half-made manager, too
        if not config.enable:
            return
        self.save_future: Any = None
        self._config = config
        self._folder = os.path.join(base_folder, config.folder)
        check_version("torchtitan")
        self._quality = _quality_of(config)
        _check(config, self._folder, model_parts)
        self._model = model_parts[0]
        self._optimizers = list(optimizers)
        self._trainer = states["train_state"]
        self._position = _Position(dataloader)
        self._extras = {
            "lr_scheduler": lr_schedulers,
            "dataloader": self._position,
            **{name: state for name, state in states.items() if state is not None},
        }
        self._start = _start_from(
            config,
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=dict(states),
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        self._checkpointer: Checkpointer | None = None
        self.enable = True

    def _opened(self) -> Checkpointer:
        """Return the checkpointer. It is made late, since torchtitan makes the validator after this manager."""
        if self._checkpointer is None:
            config = self._config
            validator = getattr(self._trainer, "validator", None)
            self._hiding = _modules_that_hide_parameters(self._model)
            with _without_hooks(self._hiding):
                self._checkpointer = Checkpointer(
                    self._folder,
                    self._model,
                    self._optimizers if len(self._optimizers) > 1 else self._optimizers[0],
                    extras=self._extras,
                    evaluate=None if validator is None or self._quality.preset == "lossless" else _Loss(validator),
                    quality=self._quality,
                    every=config.interval,
                    keep=Keep(last=config.keep_latest_k or None),
                )
        return self._checkpointer

    def _load(self, step: int = -1) -> bool:
        checkpointer = self._opened()
        with _without_hooks(self._hiding):
            found = checkpointer.restore(None if step == -1 else step, only=self._parts_to_load())
        if found is None and self._start is not None:
            return bool(self._start.load())
        return found is not None

    def _parts_to_load(self) -> list[str] | None:
        """Return the names of the objects to restore; None for all of them."""
        excluded = set(self._config.exclude_from_loading)
        parts = ["model", "optimizer", *self._extras, "rng"]
        if unknown := sorted(excluded - set(parts)):
            raise DynaquantError(
                f"checkpoint.exclude_from_loading names {unknown[0]!r}; a checkpoint has {', '.join(parts[1:])}"
            )
        return [part for part in parts if part not in excluded] if excluded else None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        checkpointer = self._opened()
        self._position.gather()
        with _without_hooks(self._hiding):
            self.save_future = checkpointer.save(curr_step)
        return True

    def _wait_for_saving(self) -> None:
        self._opened().wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: ``save`` returns when the state is captured."""

    def _close(self) -> None:
        try:
            if self._checkpointer is not None:
                self._checkpointer.close()
        finally:
            self._position.close()


class _Loss:
    """The loss of torchtitan's validator. The validator logs it; a copy of the validator reports it here instead."""

    def __init__(self, validator: Any) -> None:
        self._validator = copy.copy(validator)
        self._validator.metrics_processor = self
        self.ntokens_since_last_log = 0  # the validator counts here what must not count for the training
        self._loss: float | None = None

    def log_validation(self, loss: float, step: int, **_: Any) -> None:  # noqa: ARG002
        """Keep the loss."""
        self._loss = loss

    def __call__(self, model: nn.Module) -> float:
        self._loss = None
        self._validator.validate([model], 0)
        if self._loss is None:
            raise DynaquantError(f"torchtitan's validator reported no loss; install torchtitan {TESTED['torchtitan']}")
        return self._loss


class _Position:
    """The positions of the data loaders of all ranks. torchtitan's loader knows only its own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._group: Group | None = None
        self._positions: dict[str, Any] = {}

    def gather(self) -> None:
        """Collect the present positions of all ranks. Every rank gets all, so that they are stored once. Collective."""
        self._group = self._group or Group()
        found: dict[str, Any] = {}
        for rank, position in enumerate(self._group.all_gather(self._loader.state_dict())):
            for key, value in position.items():
                if found.setdefault(key, value) != value and not key.startswith("dp_rank_"):
                    raise StateError(
                        f"{type(self._loader).__qualname__}.state_dict() has another {key!r} on rank {rank} than on "
                        "others; use a loader whose keys name the data-parallel rank, as torchtitan's own do"
                    )
        self._positions = found

    def close(self) -> None:
        """End the connection to other ranks."""
        if self._group is not None:
            self._group.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered last."""
        return dict(self._positions)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give this rank's loader its position. Raises StateError for another number of data-parallel ranks."""
        before, now = state.get("world_size"), getattr(self._loader, "dp_world_size", None)
        if before is not None and now is not None and before != now:
            raise StateError(
                f"the data was divided among {before} data-parallel ranks at the save, and is divided among {now} now; "
                f"torchtitan's data loaders cannot go on from there; use {before} ranks, or "
                'checkpoint.exclude_from_loading=["dataloader"] to begin the data again'
            )
        self._loader.load_state_dict(dict(state))


def _start_from(config: CheckpointManager.Config, **parts: Any) -> Any:
    """Return torchtitan's own manager, if a training begins with other weights than random ones; None otherwise."""
    if not (config.initial_load_path or config.initial_load_in_hf):
        return None
    names = [field.name for field in fields(BaseCheckpointManager.Config) if field.name.startswith("initial_load")]
    own = TitanManager.Config(
        enable=True, load_only=True, folder=config.folder, **{name: getattr(config, name) for name in names}
    )
    return own.build(**parts)


def _modules_that_hide_parameters(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose hooks give something else than their parameters in ``state_dict()``. Collective."""
    # torchtitan's attention is one: it divides its weight in three. The weight itself is stored instead, as it is what
    # the training changes, and as its parts would have to be gathered from all ranks at every save.
    found: list[nn.Module] = []
    for module in reversed(list(model.modules())):  # those inside come first
        if module._state_dict_hooks:
            with _without_hooks(found):
                stored = wrappers.state_dict(module)
            if any(name not in stored for name, _ in wrappers.named_parameters(module)):
                found.append(module)
    return found


@contextmanager
def _without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules give and take their own parameters in a block."""
    names = ("_state_dict_hooks", "_load_state_dict_pre_hooks")
    hooks = [(module, name, getattr(module, name)) for module in modules for name in names]
    for module, name, _ in hooks:
        setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, name, own in hooks:
            setattr(module, name, own)


def _from_words(words: Sequence[str]) -> Quality:
    """Return the quality that words on the command line mean: a preset, and ``field=value`` for each other field."""
    preset, *others = words or ["balanced"]
    try:
        pairs = (word.partition("=") for word in others)
        return Quality(preset, **{name: literal_eval(value) for name, _, value in pairs})  # type: ignore[arg-type]
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{' '.join(words)}: write e.g. high max_degradation=0.002 ({error})") from None


_ON_COMMAND_LINE = PrimitiveConstructorSpec(
    nargs="*",
    metavar="PRESET [FIELD=VALUE ...]",
    instance_from_str=_from_words,
    is_instance=lambda value: isinstance(value, str | Quality),
    str_from_instance=lambda value: [str(value)],
)
"""How torchtitan's command line reads ``quality``."""


def _quality_of(config: CheckpointManager.Config) -> Quality:
    """Return the quality of a configuration, which may have fields by their deprecated names."""
    names = "max_degradation", "training_budget", "expected_restores"
    deprecated = {name: value for name in names if (value := getattr(config, name)) is not None}
    return options_of("CheckpointManager.Config", deprecated, config.quality).quality


def _check(config: CheckpointManager.Config, folder: str, model_parts: Sequence[nn.Module]) -> None:
    """Raise DynaquantError for what is not supported."""
    if len(model_parts) != 1:
        raise DynaquantError("pipeline parallelism is not supported: use torchtitan's own CheckpointManager")
    if config.last_save_model_only:
        raise DynaquantError(
            "checkpoint.last_save_model_only is not supported: leave it False, and write the weights alone with "
            "`dynaquant export`"
        )
    if config.create_seed_checkpoint:
        raise DynaquantError(
            "checkpoint.create_seed_checkpoint is not supported: make it with torchtitan's own CheckpointManager, and "
            "begin from it with checkpoint.initial_load_path"
        )
    if "://" in folder:
        raise DynaquantError(f"{folder} is a remote folder, which is not supported: give a local one")
    if os.path.isdir(folder) and any(each.is_dir() and each.name.startswith("step-") for each in os.scandir(folder)):
        raise DynaquantError(
            f"{folder} holds torchtitan's own checkpoints: give another checkpoint.folder, and begin from one of them "
            "with checkpoint.initial_load_path and checkpoint.initial_load_model_only=False"
        )
