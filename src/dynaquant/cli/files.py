"""Commands that read or write files of other programs: ``compress``, ``decompress``, ``pack``, ``unpack``, …"""

# ruff: noqa: PLC0415
# Each command imports what it needs when it runs, so that --help does not load PyTorch, which takes seconds.

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from dynaquant.cli import output
from dynaquant.cli.output import AsJson
from dynaquant.errors import CheckpointError
from dynaquant.formatting import in_bytes, plural
from dynaquant.interop.targets import Target
from dynaquant.save.presets import QualityName
from dynaquant.store.files import is_file_name

if TYPE_CHECKING:
    from dynaquant.interop.packing import Packer
    from dynaquant.restore.load import Stored
    from dynaquant.save.record import Record
    from dynaquant.store.container import CheckpointFile

Quality = Annotated[str, typer.Option(help=f"One of {', '.join(get_args(QualityName))}.")]
MaxDegradation = Annotated[
    float | None, typer.Option(help="Relative loss of the metric that is allowed; else the quality's.", min=0)
]
MetricName = Annotated[
    str | None,
    typer.Option("--metric", help="module:function of what dynaquant.load returns; gives a number.", metavar="NAME"),
]
HigherIsBetter = Annotated[bool, typer.Option("--higher-is-better", help="Of the metric; else lower is.")]
To = Annotated[Target | None, typer.Option(help="Format.", show_default="by the suffix of OUT, else as it was")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def compress(
    source: Annotated[
        Path,
        typer.Argument(
            help="A safetensors or torch.save file; a folder of Hugging Face, a trainer's checkpoint, or DCP.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write.", show_default="SOURCE.dqc")
    ] = None,
    quality: Quality = "balanced",
    max_degradation: MaxDegradation = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make one small file of a model's weights, or of a whole training state.

    Of a folder, the weights and the optimizer are taken apart, and other files carried along byte for byte.

    With --metric the most compact form is searched for that makes the metric worse by at most what the quality allows,
    and each tensor is stored as precisely as the metric minds; without, an estimate from how far the weights move
    decides. No code in the source is run.
    """
    from dynaquant.interop.packing import compress as compress_file
    from dynaquant.store.container import CheckpointFile
    from dynaquant.store.listing import SUFFIX

    out = out if out is not None else source.with_name(source.name + SUFFIX)
    output.must_not_exist(out, force)
    with output.telling() as tell:
        record = compress_file(source, out, _packer(quality, max_degradation, metric, higher_is_better, tell))
    if as_json:
        output.print_json({**record.to_json(), "out": str(out), "before": record.total.raw})
        return
    output.print_(f"{out}: {output.smaller(record.total)}")
    _print_carried(CheckpointFile(out))
    _print_quality(record)


def decompress(
    source: Annotated[Path, typer.Argument(help="A file that compress has made.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file or folder to write.", show_default=False)],
    to: To = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a compressed file back in the format that it had, or in another one."""
    from dynaquant.interop.export import export as export_checkpoint
    from dynaquant.interop.export import target_for
    from dynaquant.restore.load import Stored

    output.must_not_exist(out, force)
    if not source.is_file():
        raise CheckpointError(f"{source} is no file" + (" (unpack and export go with runs)" if source.is_dir() else ""))
    stored = Stored(source)
    with output.telling() as tell:
        export_checkpoint(stored, to or target_for(stored, out), out, tell)
    size = output.size_of(out)
    output.report(as_json, f"{out}: {in_bytes(size)}", out=str(out), bytes=size)


def pack(
    files: Annotated[list[Path], typer.Argument(help="Checkpoints: files or folders as for compress.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run's folder.", show_default=False)],
    quality: Quality = "balanced",
    max_degradation: MaxDegradation = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = False,
    as_json: AsJson = False,
) -> None:
    """Make a run of a series of existing checkpoints, each coded given the one before.

    Steps are the last numbers in the names, or else in those of the folders they are in. Those that the run has
    already are left as they are, so that an interrupted command can be given again, and new checkpoints be added.
    """
    from dynaquant.interop.packing import pack as pack_files
    from dynaquant.interop.packing import step_of
    from dynaquant.save.record import Size, record_of
    from dynaquant.store.run import Run

    by_step: dict[int, Path] = {}
    for file in files:
        step = step_of(file)
        if step is None:
            raise CheckpointError(f"{file}: there is no number in its name, or its folder's, to be its step; rename it")
        if step in by_step:
            raise CheckpointError(f"{file} and {by_step[step]} would both be step {step}; the last number counts")
        by_step[step] = file
    records: list[Record] = []
    there = 0
    with output.telling() as tell:

        def tell_of(text: str) -> None:
            tell(f"{len(records) + there + 1} of {len(by_step)}: {text}")

        packer = _packer(quality, max_degradation, metric, higher_is_better, tell_of)
        for record in pack_files(by_step, out, packer):
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
        text += f", {there} were there already and stay as they are"
    output.print_(f"{text}; {output.smaller(sum((record_of(file).total for file in files_of_run), Size()))}")
    _print_notes(records)
    order = Run(out).steps()
    if order[-1] != max(order):
        output.print_(f"note: step {order[-1]} was packed last and counts as the newest, though there is {max(order)}")


def export(
    folder: output.RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file or folder to write.", show_default=False)],
    step: output.Step = None,
    to: Annotated[Target, typer.Option(help="Format.")] = Target.SAFETENSORS,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as a file that needs no dynaquant to be read.

    A model's state dict as safetensors, as a Hugging Face folder (hf) or as torch.save does (torch). The whole state of
    the training with torch-state, which torch.load reads with weights_only=False, and with dcp, a folder of
    torch.distributed.checkpoint.
    """
    from dynaquant.interop.export import export as export_checkpoint

    output.must_not_exist(out, force)
    stored = output.stored(folder, step)
    with output.telling() as tell:
        export_checkpoint(stored, to, out, tell)
    _say_written(stored, out, as_json)


def unpack(
    folder: output.RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="What to write.", show_default=False)],
    step: Annotated[str | None, typer.Option(help="Only this one (a step or a tag), as OUT itself.")] = None,
    to: To = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the checkpoints of a run back as the files that were packed: all into the folder OUT, or one as OUT."""
    from dynaquant.interop.export import export as export_checkpoint
    from dynaquant.interop.export import target_for
    from dynaquant.restore.load import Stored

    files = output.open_run(folder)[1]
    if step is not None:
        output.must_not_exist(out, force)
        stored = output.stored(folder, step)
        with output.telling() as tell:
            export_checkpoint(stored, to or target_for(stored, out), out, tell)
        _say_written(stored, out, as_json)
        return
    out.mkdir(parents=True, exist_ok=True)
    paths = {file.header.step: out / _name_of(file.header.record, file.header.step) for file in files}
    if len(set(paths.values())) < len(paths):  # a run that was put together by hand
        paths = {step: out / f"step-{step}" for step in paths}
    for path in paths.values():
        output.must_not_exist(path, force)
    for number, path in output.with_progress(paths.items(), "unpacking", len(paths)):
        stored = Stored(folder, number)
        export_checkpoint(stored, to or target_for(stored, path), path)
    written = {step: {"out": str(path), "bytes": output.size_of(path)} for step, path in paths.items()}
    text = f"{out}: {plural(len(paths), 'checkpoint')}, {in_bytes(output.size_of(out))}"
    output.report(as_json, text, out=str(out), checkpoints=written)


def _say_written(stored: Stored, out: Path, as_json: bool) -> None:
    step, size = stored.file.header.step, output.size_of(out)
    output.report(as_json, f"{out}: step {step}, {in_bytes(size)}", out=str(out), step=step, bytes=size)


def _name_of(record: dict[str, Any], step: int) -> str:
    source = record.get("source")
    name = source.get("name") if isinstance(source, dict) else None
    return str(name) if is_file_name(name) else f"step-{step}"  # a name out of a file is not to lead anywhere else


def _packer(
    quality: str, max_degradation: float | None, metric: str | None, higher_is_better: bool, tell: Callable[[str], None]
) -> Packer:
    from dynaquant.interop.packing import Packer

    if quality not in get_args(QualityName):
        raise typer.BadParameter(f"--quality is one of {', '.join(get_args(QualityName))}, not {quality!r}")
    try:
        function = _function(metric) if metric is not None else None
        return Packer(quality, max_degradation, function, higher_is_better, tell)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _function(name: str) -> Callable[[Any], float]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise typer.BadParameter(f"--metric is module:function, e.g. metrics:loss for loss in metrics.py, not {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # anything may happen while a module is imported
        raise typer.BadParameter(f"--metric {name}: {error!r}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise typer.BadParameter(f"--metric {name}: it is no function")
    checked: Callable[[Any], float] = found
    return checked


def _print_carried(file: CheckpointFile) -> None:
    """Which files are in a checkpoint that was just written, byte for byte."""
    source = file.header.record["source"]
    if files := source.get("files"):
        size = sum(file.header.by_name[tensor].raw_size for tensor in files.values())
        output.print_(
            f"carried along byte for byte: {plural(len(files), 'file')}, {in_bytes(size)} ({', '.join(files)})"
        )


def _print_notes(records: list[Record]) -> None:
    notes = Counter(note for record in records for note in record.notes)
    for note, count in notes.items():
        output.print_(f"note: {note}" + (f" ({count} of {len(records)} checkpoints)" if len(records) > 1 else ""))


def _print_quality(record: Record) -> None:
    quality = record.quality
    if record.search == "lossless":
        output.print_("nothing is lost")
    elif quality is not None:
        output.print_(
            f"metric: {quality.original:.6g} before, {quality.restored:.6g} after: {quality.degradation:+.2%} "
            f"({record.limit:.2%} allowed)"
        )
    else:
        output.print_("quality: an estimate from how far the weights move; --metric measures it")
    _print_notes([record])
