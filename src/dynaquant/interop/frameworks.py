"""Writes a checkpoint as the framework that trained it does, so that a training goes on there without dynaquant.

A folder of Transformers is what its ``Trainer`` resumes from and ``from_pretrained`` reads, one of Accelerate is for
``load_state``, and a file of Lightning for ``fit(ckpt_path=…)``. No framework is imported.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynaquant.errors import CheckpointError
from dynaquant.formatting import plural
from dynaquant.interop import torchfile
from dynaquant.interop.targets import Target
from dynaquant.interop.weights import Tell, of_omitted, untied, write_safetensors, write_shards
from dynaquant.restore.dropped_moments import names_of_dropped
from dynaquant.restore.model_tensors import weights_in_parts
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.state.of_ranks import RANKS
from dynaquant.state.tree import dict_items, tensor_name
from dynaquant.store.atomic_files import atomic_file, atomic_folder
from dynaquant.store.files import is_file_name, removing_empty_folders
from dynaquant.store.pointers import FRAMEWORK_FOLDER, RUN_FOLDER, read_pointer
from dynaquant.training.collect import number_of_ranks, stored_rng_state
from dynaquant.training.objects import RESERVED, RNG
from dynaquant.training.optimizers import by_number
from dynaquant.training.rng import device_states

ADAPTERS = "dynaquant_adapters.json"
"""The file in a run's ``FRAMEWORK_FOLDER`` that maps the keys of PEFT's files to names in the model's state dict."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_TITLES = {Target.TRANSFORMERS: "Transformers", Target.ACCELERATE: "Accelerate", Target.LIGHTNING: "Lightning"}
_OF_ACCELERATE = re.compile(r"(scheduler|loader|registered)(_[0-9]+)?")
"""Names of the objects that Accelerate loads besides models and optimizers; numbered from the second one on."""


def framework_of(stored: StoredCheckpoint) -> Target | None:
    """Return the framework whose training saved a checkpoint; None if it was a loop of its own."""
    nodes = _nodes(stored.file.header.tree)
    if {"state", "unlogged"} <= _nodes(nodes.get("trainer")).keys():
        return Target.TRANSFORMERS
    if {"counts", "step", "loaders"} <= _nodes(nodes.get("accelerator")).keys():
        return Target.ACCELERATE
    return Target.LIGHTNING if "pytorch-lightning_version" in nodes else None


def write(stored: StoredCheckpoint, target: Target, out: Path, tell: Tell) -> list[str]:
    """Write a checkpoint for a framework to ``out``. Returns notes: what differs from the framework's own checkpoint.

    Raises CheckpointError if another framework, or none, saved the checkpoint, or if it lacks what is needed.
    """
    _check(stored, target)
    parent = out.absolute().parent
    with removing_empty_folders(parent):
        parent.mkdir(parents=True, exist_ok=True)  # the frameworks keep their checkpoints in a folder, often a new one
        return _of_dropped(stored) + _write(stored, target, out, tell)


def _write(stored: StoredCheckpoint, target: Target, out: Path, tell: Tell) -> list[str]:
    try:
        if target is Target.LIGHTNING:
            with atomic_file(out) as file:
                torchfile.write(file, stored.state())
            return [*of_omitted(stored), *_of_lightning(stored, out)]
        with atomic_folder(out) as folder:
            if target is Target.TRANSFORMERS:
                return _write_transformers(stored, folder, out, tell)
            return of_omitted(stored) + _write_accelerate(stored, folder, tell)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{stored.file.path}: its state is not that of a training with {_TITLES[target]} ({error!r}); --to "
            f"{Target.TORCH_STATE} writes it as it is"
        ) from error


def _check(stored: StoredCheckpoint, target: Target) -> None:
    found = framework_of(stored)
    if found is target:
        return
    if found is not None:
        advice = f"it was saved with {_TITLES[found]}: give --to {found}"
    elif "source" in stored.file.header.record:
        advice = "it was made from a file or folder: leave out --to, and give it to decompress or unpack"
    else:
        advice = f"no framework saved it: --to {Target.HF} writes the model, --to {Target.DCP} the whole state"
    raise CheckpointError(f"{stored.file.path} cannot become a checkpoint of {_TITLES[target]}; {advice}")


def _check_plain(stored: StoredCheckpoint) -> None:
    """Raise CheckpointError for weights in whose place their parts are stored, under names that no framework loads."""
    for name, kind in weights_in_parts(stored.file).items():
        raise CheckpointError(
            f"{stored.file.path}: {name} is of a tensor class ({kind}), and the run holds the tensors that it is made "
            "of, which the framework does not load; build a model with such weights, fill it with "
            "dynaquant.load_into(model, …), and save it as the framework does"
        )


def _nodes(node: Any) -> dict[str, Any]:
    """Return the nodes in a dictionary's node by name."""
    return {key: inner for key, inner in dict_items(node) if isinstance(key, str)}


def _of_dropped(stored: StoredCheckpoint) -> list[str]:
    if not (dropped := names_of_dropped(stored.chain)):
        return []
    return [
        f"{len(dropped)} first moments that the checkpoint dropped are zeros, and nothing corrects the first steps "
        'after that outside of dynaquant; quality="lossless" keeps them'
    ]


def _save(folder: Path, name: str, state: Any) -> None:
    with (folder / name).open("xb") as file:
        torchfile.write(file, state)


def _rng_states(stored: StoredCheckpoint) -> list[dict[str, Any]]:
    """Return the states of each rank's generators, as ``rng.get_state`` does, with Python's words as a tuple."""
    state = {RNG: stored.state(RNG)}
    found = []
    for rank in range(number_of_ranks(state)):
        own = stored_rng_state(state, rank)
        if own is None:
            raise ValueError(f"rank {rank} has no random number generators")
        version, words, gauss = own["python"]
        found.append({**own, "python": (version, tuple(int(word) for word in words), gauss)})
    return found


# Transformers


def _write_transformers(stored: StoredCheckpoint, folder: Path, out: Path, tell: Tell) -> list[str]:
    nodes, notes = _nodes(stored.file.header.tree), []
    files = stored.file.path.parent / FRAMEWORK_FOLDER
    adapters = _adapters(files)
    if files.is_dir():
        shutil.copytree(files, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ADAPTERS))
    else:
        notes.append(
            "left out, as the run does not have them: config.json, tokenizer and training_args.bin. A Trainer resumes "
            "without them; for from_pretrained, save those that the model was trained with into the folder: "
            "model.config.save_pretrained(…), tokenizer.save_pretrained(…)"
        )
    if adapters is None:
        _check_plain(stored)
        _check_whole(stored)
        notes += of_omitted(stored)
        write_shards(stored, stored.state_dict, {}, folder, tell)
    else:
        notes += _write_adapters(stored, adapters, folder, tell)
    if "optimizer" in nodes:
        _save(folder, "optimizer.pt", by_number(stored.state("optimizer")))
    else:
        notes.append("left out, as save_only_model was set: optimizer and scheduler")
    for name in ("scheduler", "scaler"):
        if name in nodes:
            _save(folder, f"{name}.pt", stored.state(name))
    ranks = _rng_states(stored)
    for rank, state in enumerate(ranks):
        own = {"python": state["python"], "numpy": state["numpy"], "cpu": state["torch"]}
        for kind, states in device_states(state).items():
            if states:
                own[kind] = states if len(ranks) > 1 else states[0]
        _save(folder, "rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth", own)
    state = stored.state("trainer")["state"]
    notes += _place_best(state, stored.file.header.step, out.absolute())
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    return notes + _of_extras(stored, nodes.keys() - {"model", "optimizer", "scheduler", "scaler", "trainer"})


def write_configuration(stored: StoredCheckpoint, folder: Path) -> None:
    """Write what ``from_pretrained`` reads beside weights, if a Trainer saved the checkpoint and the run has it."""
    files = stored.file.path.parent / FRAMEWORK_FOLDER
    if files.is_dir() and framework_of(stored) is Target.TRANSFORMERS and _adapters(files) is None:
        shutil.copytree(files, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("training_args.bin"))


def _adapters(files: Path) -> dict[str, dict[str, str]] | None:
    """Return the names of adapter weights by key of PEFT, for each sub-folder (``""`` is none); None without PEFT."""
    try:
        found = {place: dict(names) for place, names in json.loads((files / ADAPTERS).read_text()).items()}
        if bad := [place for place in found if place and not all(map(is_file_name, place.split("/")))]:
            raise ValueError(f"{bad[0]!r} is no folder in it")
    except FileNotFoundError:
        return None
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{files / ADAPTERS}: cannot be read ({error}); resume the training once, which writes it at its next save"
        ) from error
    return found


def _check_whole(stored: StoredCheckpoint) -> None:
    """Raise CheckpointError for a model that is not stored as a whole: Transformers fills what is missing at random."""
    omitted = [entry.name for entry in stored.file.header.entries if entry.omitted and entry.name.startswith("model.")]
    if omitted:
        raise CheckpointError(
            f"{stored.file.path}: the run does not store {plural(len(omitted), 'tensor')} of the model (role omit), "
            f"such as {omitted[0]}, and Transformers would begin with random ones. Fill a model that has them, "
            "dynaquant.load_into(model, …), and write it, model.save_pretrained(…). If it is a model of PEFT, the run "
            "lacks the names that PEFT gives its weights. An earlier version did not keep them: resume the training "
            "once, which adds them at its next save. Adapters that PEFT computes when it saves, as those of prompt "
            "learning, have none"
        )


def _write_adapters(
    stored: StoredCheckpoint, adapters: Mapping[str, Mapping[str, str]], folder: Path, tell: Tell
) -> list[str]:
    known, lost = stored.state_dict, []
    for place, own in adapters.items():
        names = {key: known[name] for key, name in own.items() if name in known}
        lost += [key for key in own if key not in names]
        (folder / place).mkdir(parents=True, exist_ok=True)
        with (folder / place / ADAPTER_WEIGHTS).open("xb") as file:
            write_safetensors(stored, file, names, {"format": "pt"}, tell)
    return [f"left out, as the run does not store them: {', '.join(lost)}"] if lost else []


def _place_best(state: dict[str, Any], step: int, out: Path) -> list[str]:
    """Let a ``TrainerState`` name a folder with the best model in place of a run, which Transformers cannot read."""
    best = state.get("best_global_step")
    if Path(state.get("best_model_checkpoint") or "").name != RUN_FOLDER:
        return []
    beside = out if best == step else out.parent / f"checkpoint-{best}"
    state["best_model_checkpoint"] = str(beside) if best == step or beside.is_dir() else None
    if state["best_model_checkpoint"] is not None:
        return []
    return [
        f"the best checkpoint is step {best}, and {beside} is not there, so load_best_model_at_end knows only those to "
        "come; export that step there first"
    ]


def _of_extras(stored: StoredCheckpoint, names: set[str]) -> list[str]:
    """Return a note on objects that the framework does not load."""
    extras = sorted(names - {*RESERVED, RANKS})
    if not extras:
        return []
    return [
        f"left out, as the framework does not load them: {', '.join(extras)}. dynaquant.load"
        f"({str(stored.file.path.parent)!r}, {stored.file.header.step})[{extras[0]!r}] has the first"
    ]


# Accelerate


def _write_accelerate(stored: StoredCheckpoint, folder: Path, tell: Tell) -> list[str]:
    _check_plain(stored)
    nodes, known = _nodes(stored.file.header.tree), stored.state_dict
    for number, prefix in enumerate(_prefixes(nodes["model"])):
        names = untied({key.removeprefix(prefix): name for key, name in known.items() if key.startswith(prefix)})[0]
        with (folder / f"{_numbered('model', number)}.safetensors").open("xb") as file:
            write_safetensors(stored, file, names, {"format": "pt"}, tell)
    optimizers = stored.state("optimizer")
    for number, state in enumerate([optimizers] if "param_groups" in optimizers else optimizers.values()):
        _save(folder, f"{_numbered('optimizer', number)}.bin", by_number(state))
    others = [name for name in nodes if _OF_ACCELERATE.fullmatch(name)]
    for name in others:
        kind, _, digits = name.partition("_")
        path = {
            "scheduler": f"{name}.bin",
            "loader": f"{name.replace(kind, 'dl_state_dict')}.bin",
            "registered": f"custom_checkpoint_{digits or 0}.pkl",
        }[kind]
        _save(folder, path, stored.state(name))
    if "scaler" in nodes:
        _save(folder, "scaler.pt", stored.state("scaler"))
    progress = stored.state("accelerator")
    for rank, state in enumerate(_rng_states(stored)):
        own = {
            "step": progress["step"],
            "random_state": state["python"],
            "numpy_random_seed": state["numpy"],
            "torch_manual_seed": state["torch"],
            **{f"torch_{kind}_manual_seed": states for kind, states in device_states(state).items() if states},
        }
        _save(folder, f"random_states_{rank}.pkl", own)
    notes = _of_extras(stored, nodes.keys() - {"model", "optimizer", "scaler", "accelerator", *others})
    loaders = progress["loaders"]
    if any(each["seed"] is not None for each in loaders):
        places = "; ".join(f"epoch {each['epoch']}, seed {each['seed']}" for each in loaders)
        notes.append(
            f"Accelerate itself does not restore epochs and seeds of data loaders ({places}): prepare them with the "
            "same seed, and call loader.set_epoch(…)"
        )
    return notes


def _prefixes(model: Any) -> list[str]:
    """Return what the keys of each model begin with: nothing, if there is one."""
    items = dict_items(model)
    several = all(dict_items(node) and tensor_name(node) is None for _, node in items)
    return [f"{key}." for key, _ in items] if several else [""]


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


# Lightning


def _of_lightning(stored: StoredCheckpoint, out: Path) -> list[str]:
    callbacks = _nodes(_nodes(stored.file.header.tree).get("callbacks"))
    notes = []
    if "Training" in callbacks:
        notes.append(
            "Lightning itself does not restore random number generators; their states are those of the callback "
            "dynaquant.integrations.lightning.Training, which also works alone"
        )
    best = {path for node in callbacks.values() if isinstance(path := _nodes(node).get("best_model_path"), str)}
    for path in map(Path, sorted(best)):
        if path.absolute() != out.absolute() and _is_pointer(path):
            notes.append(
                f"the best checkpoint is {path}, which Lightning itself cannot read; for "
                'ckpt_path="best", export it to that path, too, with --force'
            )
    return notes


def _is_pointer(path: Path) -> bool:
    try:
        return path.is_file() and read_pointer(path) is not None
    except CheckpointError:  # a damaged one
        return True
