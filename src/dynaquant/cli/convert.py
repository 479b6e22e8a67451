"""Commands for files of other programs: ``compress``, ``decompress``, ``pack``, ``unpack``, ``export``."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaquant.cli import output
from dynaquant.cli.arguments import AsJson, Force, RunFolder, RunOrFile, Step, must_not_exist, open_run, open_stored
from dynaquant.errors import CheckpointError
from dynaquant.formatting import in_bytes, plural
from dynaquant.interop.targets import Target
from dynaquant.store.files import is_file_name

if TYPE_CHECKING:
    from dynaquant.interop.packing import Packer
    from dynaquant.restore.stored_checkpoint import StoredCheckpoint
    from dynaquant.saving.record import Record
    from dynaquant.store.container import CheckpointFile

Quality = Annotated[str, typer.Option(help="How much may be lost: lossless, high, balanced, small.")]
MaxDegradation = Annotated[
    float | None,
    typer.Option(help="Largest relative degradation of the metric.", show_default="what the quality allows", min=0),
]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="Function that scores the model, as module:function. It gets what dynaquant.load returns and returns a "
        "number.",
        metavar="NAME",
    ),
]
HigherIsBetter = Annotated[bool, typer.Option("--higher-is-better", help="A higher metric is better.")]
To = Annotated[
    Target | None,
    typer.Option(
        help="Format to write.", show_default="by the suffix of OUT, else the original format, else safetensors"
    ),
]
SkipObjects = Annotated[
    bool,
    typer.Option(
        "--skip-objects",
        help="Leave out what files of torch.save hold besides tensors and plain values, e.g. a class among the "
        "hyperparameters of a .ckpt. By default that is an error.",
    ),
]
_SUFFIXES = {Target.SAFETENSORS: ".safetensors", Target.TORCH: ".pt", Target.TORCH_STATE: ".pt"}
"""Suffixes of the formats that are one file."""


def compress(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A safetensors or torch.save file; or a folder: Hugging Face model, checkpoint of a trainer, or DCP.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.", show_default="SOURCE.dqc")] = None,
    quality: Quality = "balanced",
    max_degradation: MaxDegradation = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = False,
    skip_objects: SkipObjects = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compress a model's weights, or a whole training state, into one small file.

    In a folder, weights and optimizer state are compressed; other files are stored byte for byte.

    With --metric, dynaquant searches for the most compact form whose degradation stays within --max-degradation, and
    measures the sensitivity of the metric to each tensor. Without it, the degradation is estimated from how far the
    weights move. No code in SOURCE is run.
    """
    from dynaquant.interop.export import is_foreign
    from dynaquant.interop.packing import compress as compress_file
    from dynaquant.store.container import CheckpointFile
    from dynaquant.store.run import SUFFIX

    if out is None:
        named = source if source.name not in ("", "..") else source.resolve()
        if not named.name:
            raise CheckpointError(f"{source} has no name that the output could have; give one with --out")
        out = named.with_name(f"{named.name}{SUFFIX}")
    if is_foreign(out):
        raise CheckpointError(f"{out}: compress writes a file of dynaquant; let its name end in {SUFFIX}")
    must_not_exist(out, force)
    with output.status_line() as tell:
        record = compress_file(
            source, out, _packer(quality, max_degradation, metric, higher_is_better, tell), skip_objects
        )
    if as_json:
        output.print_json({**record.to_json(), "out": str(out), "before": record.total.raw})
        return
    output.print_(f"{out}: {output.reduction(record.total)}")
    _print_raw_files(CheckpointFile(out))
    _print_quality(record)


def decompress(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file written by compress.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="File or folder to write.", show_default=False)],
    to: To = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a compressed file in its original format, or in another one.

    safetensors and torch hold the weights alone, hf also the other files of a folder that was compressed. torch-state
    and dcp hold all tensors, also those of an optimizer. An OUT that ends in .pt, .pth, .bin or .ckpt is torch-state.
    Notes say what the output leaves out.
    """
    from dynaquant.restore.stored_checkpoint import StoredCheckpoint

    must_not_exist(out, force)
    if not source.is_file():
        raise CheckpointError(
            f"{source} is not a file" + (" (for a run, use unpack or export)" if source.is_dir() else "")
        )
    stored = StoredCheckpoint(source)
    size, notes = _written(stored, to, out)
    output.print_result(as_json, f"{out}: {in_bytes(size)}", out=str(out), bytes=size, notes=notes)
    _print_notes([] if as_json else notes)


def pack(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Checkpoints: files or folders, as for compress.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run.", show_default=False)],
    quality: Quality = "balanced",
    max_degradation: MaxDegradation = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = False,
    skip_objects: SkipObjects = False,
    as_json: AsJson = False,
) -> None:
    """Compress a series of existing checkpoints into a run, each as a delta of the previous one.

    The step is the last number in the name of a checkpoint, or else of its folder. Steps that the run already has are
    skipped, so you can repeat an interrupted command, or add new checkpoints later.
    """
    from dynaquant.interop.packing import pack as pack_files
    from dynaquant.interop.packing import step_of
    from dynaquant.saving.record import Size, record_of
    from dynaquant.store.run import Run

    by_step: dict[int, Path] = {}
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} does not exist")
        step = step_of(file)
        if step is None:
            raise CheckpointError(f"{file}: no number in its name or its folder's name gives the step; rename it")
        if step in by_step:
            raise CheckpointError(
                f"{file} and {by_step[step]} would both be step {step}, the last number in the name; rename one"
            )
        by_step[step] = file
    records: list[Record] = []
    there = 0
    with output.status_line() as tell:

        def tell_of(text: str) -> None:
            tell(f"{len(records) + there + 1} of {len(by_step)}: {text}")

        packer = _packer(quality, max_degradation, metric, higher_is_better, tell_of)
        for record in pack_files(by_step, out, packer, skip_objects):
            if record is None:
                there += 1
            else:
                records.append(record)
    if as_json:
        output.print_json([record.to_json() for record in records])
        return
    files_of_run = [Run(out).file(step) for step in by_step]
    text = f"{out}: {plural(len(records), 'checkpoint')} packed"
    if there:
        text += f", {there} skipped (already in the run)"
    output.print_(f"{text}; {output.reduction(sum((record_of(file).total for file in files_of_run), Size()))}")
    _print_notes([note for record in records for note in record.notes], len(records))
    order = Run(out).steps()
    if order[-1] != max(order):
        output.print_(
            f"note: step {order[-1]} was packed last and counts as the newest, although step {max(order)} exists"
        )


def export(
    folder: RunOrFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="File or folder to write.", show_default=False)],
    step: Step = None,
    to: Annotated[Target | None, typer.Option(help="Format to write.", show_default="by the suffix of OUT")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in a format that other programs read.

    The weights alone: safetensors, hf (a Hugging Face folder) or torch (as torch.save writes it). The suffix of OUT
    chooses between safetensors (.safetensors) and torch (.pt, .pth, .bin, .ckpt); others need --to. The whole training
    state, with that of the optimizer: torch-state (for torch.load with weights_only=False) or dcp (a folder of
    torch.distributed.checkpoint). What a training without dynaquant resumes from: transformers (a folder for
    resume_from_checkpoint and from_pretrained), accelerate (a folder for load_state) or lightning (a file for
    ckpt_path), each for a run of that framework. Notes say what the output leaves out.
    """
    from dynaquant.interop.export import model_target

    to = to or model_target(out)
    must_not_exist(out, force)
    _export(open_stored(folder, step), to, out, as_json)


def unpack(
    folder: RunFolder,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write, or with --step one file.", show_default=False)
    ],
    step: Annotated[str | None, typer.Option(help="Write only this checkpoint (a step or a tag).")] = None,
    to: To = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the checkpoints of a packed run in their original format: all of them into a folder, or one to a file.

    A run that a training saved has no original format: its weights are written as safetensors. --to torch-state and dcp
    write the whole state, with that of the optimizer; so does --step with an OUT that ends in .pt, .pth, .bin or .ckpt.
    Notes say what the output leaves out.
    """
    from dynaquant.interop.export import export as export_checkpoint
    from dynaquant.interop.export import target_for
    from dynaquant.restore.stored_checkpoint import StoredCheckpoint

    listing = open_run(folder)[1]
    if step is not None:
        must_not_exist(out, force)
        stored = open_stored(folder, step)
        _export(stored, to or target_for(stored, out), out, as_json)
        return
    out.mkdir(parents=True, exist_ok=True)
    paths = {each.summary.step: out / _name_of(each.record, each.summary.step, to) for each in listing}
    if len(set(paths.values())) < len(paths):  # equal names: the run was put together by hand
        paths = {step: out / f"step-{step}" for step in paths}
    for path in paths.values():
        must_not_exist(path, force)
    notes: dict[int, list[str]] = {}
    for number, path in output.with_progress(paths.items(), "unpacking", len(paths)):
        stored = StoredCheckpoint(folder, number)
        notes[number] = export_checkpoint(stored, to or target_for(stored, path), path)
    written = {
        step: {"out": str(path), "bytes": output.size_of(path), "notes": notes[step]} for step, path in paths.items()
    }
    text = f"{out}: {plural(len(paths), 'checkpoint')}, {in_bytes(output.size_of(out))}"
    output.print_result(as_json, text, out=str(out), checkpoints=written)
    if not as_json:
        _print_notes([note for each in notes.values() for note in each], len(paths))


def _written(stored: StoredCheckpoint, to: Target | None, out: Path) -> tuple[int, list[str]]:
    """Write a checkpoint in a format. Returns the bytes of the output, and notes on what it leaves out.

    Raises CheckpointError if the output would replace a file that it is made from.
    """
    from dynaquant.interop.export import export as export_checkpoint
    from dynaquant.interop.export import target_for

    if any(file.is_at(out) for file in stored.chain):
        raise CheckpointError(f"{out} is a file that this reads; give another name")
    with output.status_line() as tell:
        notes = export_checkpoint(stored, to or target_for(stored, out), out, tell)
    return output.size_of(out), notes


def _export(stored: StoredCheckpoint, to: Target, out: Path, as_json: bool) -> None:
    """Write a checkpoint of a run in a format, and print what was written."""
    from dynaquant.store.run import is_of_run

    size, notes = _written(stored, to, out)
    step = stored.file.header.step
    text = f"{out}: {f'step {step}, ' if is_of_run(stored.file) else ''}{in_bytes(size)}"
    output.print_result(as_json, text, out=str(out), step=step, bytes=size, notes=notes)
    _print_notes([] if as_json else notes)


def _name_of(record: dict[str, Any], step: int, to: Target | None) -> str:
    """Return the name of a checkpoint's source, with the suffix of the format that is written.

    A checkpoint that a training saved has no source. It is named by its step.
    """
    source = record.get("source")
    if source is None:
        return f"step-{step}{_SUFFIXES.get(to or Target.SAFETENSORS, '')}"
    name = source.get("name") if isinstance(source, dict) else None
    if not is_file_name(name):  # a name from a file must not lead out of the folder
        return f"step-{step}"
    path = Path(str(name))
    if to is Target.SAFETENSORS:
        return path.with_suffix(".safetensors").name
    if to in (Target.TORCH, Target.TORCH_STATE) and path.suffix == ".safetensors":
        return path.with_suffix(".pt").name
    return path.name


def _packer(
    quality: str, max_degradation: float | None, metric: str | None, higher_is_better: bool, tell: Callable[[str], None]
) -> Packer:
    from dynaquant import options
    from dynaquant.interop.packing import Packer

    try:
        chosen = options.Quality(quality, max_degradation=max_degradation)  # type: ignore[arg-type]
        function = _function(metric) if metric is not None else None
        return Packer(chosen, function, higher_is_better, tell)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _function(name: str) -> Callable[[Any], float]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise typer.BadParameter(
            f"--metric must be module:function, e.g. metrics:loss for loss in metrics.py, not {name!r}"
        )
    sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"--metric {name}: {error}, neither in {os.getcwd()} nor installed") from None
    except Exception as error:  # importing a module can raise anything
        raise typer.BadParameter(f"--metric {name}: {error!r}") from None
    finally:
        sys.path.remove(os.getcwd())
    found = getattr(imported, function, None)
    if not callable(found):
        own = [key for key, value in vars(imported).items() if callable(value) and not key.startswith("_")]
        raise typer.BadParameter(f"--metric {name}: {module} has no such function; it has {', '.join(own) or 'none'}")
    checked: Callable[[Any], float] = found
    return checked


def _print_raw_files(file: CheckpointFile) -> None:
    """Print which files a checkpoint that was just written contains byte for byte."""
    source = file.header.record["source"]
    if files := source.get("files"):
        size = sum(file.header.by_name[tensor].raw_size for tensor in files.values())
        output.print_(f"stored byte for byte: {plural(len(files), 'file')}, {in_bytes(size)} ({', '.join(files)})")


def _print_notes(notes: list[str], checkpoints: int = 1) -> None:
    """Print each different note once. checkpoints: how many the notes are about."""
    for note, count in Counter(notes).items():
        output.print_(f"note: {note}" + (f" ({count} of {checkpoints} checkpoints)" if checkpoints > 1 else ""))


def _print_quality(record: Record) -> None:
    quality = record.quality
    if record.search == "lossless":
        output.print_("lossless: all values are stored exactly")
    elif quality is not None and record.degradation is not None:
        output.print_(
            f"metric: {quality.original:.6g} before, {quality.restored:.6g} after; "
            f"degradation {record.degradation:+.2%} (limit {max(record.limit or 0, 0):.2%})"
        )
    else:
        hint = "; use --metric to measure it" if quality is None else ""
        output.print_(f"quality: estimated from how far the weights move{hint}")
    _print_notes(record.notes)
