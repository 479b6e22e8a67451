"""Writes a checkpoint's model, or its whole state, as files that other programs read; says what these leave out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.errors import CheckpointError, StateError
from dynaquant.interop import frameworks, torchfile
from dynaquant.interop.targets import OF_FRAMEWORKS, Target
from dynaquant.interop.weights import Tell, of_omitted, reported, strings_in, untied, write_safetensors, write_shards
from dynaquant.restore.model_tensors import weights_in_parts
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.state.of_ranks import RANKS
from dynaquant.state.tree import dict_items, model_in, objects_in, tensor_name, tensor_names_in
from dynaquant.store.atomic_files import atomic_file, atomic_folder
from dynaquant.store.files import is_file_name
from dynaquant.training.objects import CLASSES, PARAMETERS, RNG

_OF_FORMAT = {
    "safetensors": Target.SAFETENSORS,
    "huggingface": Target.HF,
    "torch": Target.TORCH_STATE,
    "dcp": Target.DCP,
}
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OTHER_SUFFIXES = (
    *(".dqc", ".onnx", ".ort", ".gguf", ".ggml", ".h5", ".hdf5", ".keras", ".tflite", ".npz", ".npy", ".pb"),
    *(".mlmodel", ".mlpackage", ".engine", ".plan", ".trt", ".pte", ".pt2", ".pkl", ".pickle", ".msgpack", ".json"),
)
"""Suffixes of formats that are not written."""
_ADVICE = f"let it end in .safetensors, {', '.join(_TORCH_SUFFIXES)}, or give --to {', '.join(Target)}"


def is_foreign(out: Path) -> bool:
    """Whether the suffix of a path is that of another format than dynaquant's own."""
    suffix = out.suffix.lower()
    return suffix != ".dqc" and suffix in (".safetensors", *_TORCH_SUFFIXES, *_OTHER_SUFFIXES)


def model_target(out: Path) -> Target:
    """Return the target for an output path that is to hold a model, from its suffix.

    Raises CheckpointError if the suffix does not tell.
    """
    if out.suffix == ".safetensors":
        return Target.SAFETENSORS
    if out.suffix in _TORCH_SUFFIXES:
        return Target.TORCH
    raise CheckpointError(f"{out}: the name does not tell the format; {_ADVICE}")


def target_for(stored: StoredCheckpoint, out: Path) -> Target:
    """Return the target for an output path: from its suffix, else from the original format, else safetensors.

    Raises CheckpointError if the suffix is that of another format, unless the original has it, too.
    """
    if out.suffix == ".safetensors":
        return Target.SAFETENSORS
    if out.suffix in _TORCH_SUFFIXES:
        return Target.TORCH_STATE
    source, suffix = _source(stored), out.suffix.lower()
    if suffix in _OTHER_SUFFIXES and not str(source.get("name")).lower().endswith(suffix):
        raise CheckpointError(f"{out}: dynaquant does not write files of the format {suffix}; {_ADVICE}")
    return _OF_FORMAT.get(str(source.get("format")), Target.SAFETENSORS)


def export(stored: StoredCheckpoint, target: Target, out: Path, tell: Tell = lambda _text: None) -> list[str]:
    """Write a checkpoint to ``out``, a file or a folder. Returns notes for the user: what the output leaves out.

    Atomic: after an error there is no output. Only one tensor of a model is in memory at a time, except for
    ``torch.save``. safetensors has no shared tensors: a tensor with several names is written under the first one, and
    the file's metadata maps the other names to it, as ``safetensors.torch.save_model`` does. If the checkpoint's
    lossless copy is damaged, everything is written again from the quantized checkpoint. tell: called with a text that
    reports progress.

    Raises CheckpointError if the checkpoint cannot be decoded, or the format cannot hold it, or is that of another
    framework than the one that saved it; OSError if ``out`` cannot be written.
    """
    return stored.with_retries(lambda: _write(stored, target, out, tell))


def _write(stored: StoredCheckpoint, target: Target, out: Path, tell: Tell) -> list[str]:
    if target in (Target.TORCH_STATE, Target.DCP, *OF_FRAMEWORKS):
        _check_objects(stored)
    if target in OF_FRAMEWORKS:
        return frameworks.write(stored, target, out, tell)
    if target in (Target.HF, Target.DCP):
        with atomic_folder(out) as folder:
            if target is Target.HF:
                _write_folder(stored, folder, tell)
            else:
                from dynaquant.interop import dcp_folder  # noqa: PLC0415 (PyTorch's DCP takes seconds to import)

                other_files = _other_files(stored)
                dcp_folder.write(folder, _state(stored, tell))
                if _source(stored).get("format") == "dcp":
                    _write_raw_files(stored, folder, other_files)
    else:
        with atomic_file(out) as file:
            if target is Target.SAFETENSORS:
                names, ties = untied(stored.state_dict)
                write_safetensors(stored, file, names, _metadata(stored) | ties, tell)
            elif target is Target.TORCH:
                torchfile.write(file, stored.model_state(reported(stored.tensors, tell)))
            else:
                torchfile.write(file, _state(stored, tell))
    return _in_parts(stored) + _left_out(stored, target)


def _left_out(stored: StoredCheckpoint, target: Target) -> list[str]:
    """Return notes on what a checkpoint has, or what it was made from had, and an output of this format has not."""
    header, source = stored.file.header, _source(stored)
    more, states, files = (_dict(source.get(key)) for key in ("more", "torch", "files"))  # the record may be malformed
    notes = header.record.get("notes")
    notes = [note for note in notes if str(note).startswith("left out")] if isinstance(notes, list) else []
    notes += of_omitted(stored)
    parts: list[str] = []
    if target not in (Target.TORCH_STATE, Target.DCP):
        written = [*more, *states.values()] if target is Target.HF else []
        beside = [str(key) for key, _ in _beside_the_model(header.tree) if key not in written]
        parts = ["random number generators" if key == RNG else key for key in beside]
    if target is not Target.HF and (target, source.get("format")) != (Target.DCP, "dcp"):
        parts += files
    return [*notes, *([f"left out: {', '.join(parts)}"] if parts else [])]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _beside_the_model(tree: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a state that are not the model, by key."""
    try:
        model = model_in(tree)
    except StateError:
        return []
    own = (CLASSES, PARAMETERS, RANKS)  # about the objects of a training, none of them
    return [(key, node) for key, node in dict_items(tree) if node is not model and key not in own and model is not tree]


def _in_parts(stored: StoredCheckpoint) -> list[str]:
    """Return a note if the output has the parts of weights in their place."""
    for name, kind in weights_in_parts(stored.file).items():
        return [
            f"in place of weights of tensor classes, such as {name} ({kind}), the output has the tensors that they are "
            "made of, which load_state_dict() does not take; build a model with such weights, and fill it with "
            "dynaquant.load_into"
        ]
    return []


def _check_objects(stored: StoredCheckpoint) -> None:
    """Raise CheckpointError if the state holds an object that only a Checkpointer puts together."""
    if (found := next(objects_in(stored.file.header.tree), None)) is not None:
        kind = found.get("object", found.get("enum"))  # the tree may be malformed
        kind = kind[0] if isinstance(kind, list) and kind else kind
        raise CheckpointError(
            f"{stored.file.path}: its optimizer keeps an object of the class {kind}, which only a Checkpointer "
            "restores; export the model alone (--to torch, or --to safetensors)"
        )


def _state(stored: StoredCheckpoint, tell: Tell) -> Any:
    return _part(stored, stored.file.header.tree, tell)


def _part(stored: StoredCheckpoint, node: Any, tell: Tell) -> Any:
    tensors = stored.tensors
    names = [name for name in tensor_names_in(node) if name in tensors]
    return stored.state_part(node, reported(LazyMapping(names, tensors.__getitem__), tell))


def _source(stored: StoredCheckpoint) -> dict[str, Any]:
    return _dict(stored.file.header.record.get("source"))


def _metadata(stored: StoredCheckpoint) -> dict[str, str]:
    """Return the metadata for a safetensors file: the original's if that was safetensors, else what readers expect."""
    source = _source(stored)
    if source.get("format") == "safetensors":
        return strings_in(source.get("metadata"))
    return {"format": "pt"} if source else {"format": "pt", "step": str(stored.file.header.step)}


@dataclass(frozen=True)
class _OtherFiles:
    """What a compressed folder held besides its main model.

    model: whether there is a main model. models: further state dicts, each with the record's entry on its files.
    states: nodes of the tree, by their file of ``torch.save``. raw_files: by file name, the name of the tensor that
    holds the file's bytes.
    """

    model: bool
    models: list[tuple[dict[str, str], dict[str, Any]]]
    states: dict[str, Any]
    raw_files: dict[str, str]


def _other_files(stored: StoredCheckpoint) -> _OtherFiles:
    """Read the record, which may be malformed. Raises CheckpointError if it does not match the checkpoint."""
    source, entries = _source(stored), stored.file.header.by_name
    nodes = {key: node for key, node in dict_items(stored.file.header.tree) if type(key) is str}
    try:
        more, files = {**source.get("more", {})}, {**source.get("torch", {})}
        raw_files: dict[str, str] = {**source.get("files", {})}
        models = [
            ({key: entries[tensor_name(node) or ""].name for key, node in dict_items(nodes[name])}, dict(more[name]))
            for name in more
        ]
        states = {file: nodes[key] for file, key in files.items()}
        kinds = {(entries[name].dtype, len(entries[name].shape)) for name in raw_files.values()}
        sound = all(map(is_file_name, (*states, *raw_files))) and kinds <= {("uint8", 1)}
    except (AttributeError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"{stored.file.path}: its record of the original folder's files is malformed; export the model alone, "
            "e.g. to safetensors"
        )
    return _OtherFiles(bool(nodes.keys() - more.keys() - set(files.values())), models, states, raw_files)


def _write_folder(stored: StoredCheckpoint, folder: Path, tell: Tell) -> None:
    """Write the model as a Hugging Face folder, and all other files if a folder was compressed."""
    other_files = _other_files(stored)
    try:
        frameworks.write_configuration(stored, folder)
        if other_files.model:
            write_shards(stored, stored.state_dict, _source(stored), folder, tell)
        for state_dict, source in other_files.models:
            write_shards(stored, state_dict, source, folder, tell)
        for file, node in other_files.states.items():
            with (folder / file).open("xb") as out:
                torchfile.write(out, _part(stored, node, tell))
        _write_raw_files(stored, folder, other_files)
    except FileExistsError as error:
        raise CheckpointError(f"{stored.file.path}: its record names the file {error.filename} twice") from None


def _write_raw_files(stored: StoredCheckpoint, folder: Path, other_files: _OtherFiles) -> None:
    for file, name in other_files.raw_files.items():
        try:
            with (folder / file).open("xb") as out:
                out.write(bytes_of(stored.tensors[name]).data)
        except FileExistsError:
            raise CheckpointError(f"{stored.file.path}: its record names the file {file} twice") from None
