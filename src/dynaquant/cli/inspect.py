"""Commands that look into a run or a checkpoint: ``log``, ``show``, ``diff``, ``verify``, ``du``, ``report``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaquant.cli import output
from dynaquant.cli.arguments import (
    AsJson,
    Force,
    RunFolder,
    RunOrFile,
    Step,
    checkpoint,
    must_not_exist,
    open_run,
    run_of,
)
from dynaquant.formatting import in_bytes, plural

if TYPE_CHECKING:
    from dynaquant.engine.forms.form import StoredTensor
    from dynaquant.errors import CheckpointError
    from dynaquant.report.decoded import Change
    from dynaquant.report.inspection import TensorInfo
    from dynaquant.saving.record import Record, Size
    from dynaquant.store.container import CheckpointFile


def log(folder: RunFolder, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: tags, size, compression ratio, degradation, configuration."""
    from dynaquant.engine.quantize.knobs import in_short
    from dynaquant.saving.record import Size, record_of
    from dynaquant.store.catalogue import Listed
    from dynaquant.store.chain import FROZEN
    from dynaquant.store.container import open_if_exists
    from dynaquant.store.run import checkpoint_paths
    from dynaquant.store.tags import is_tagged, tags_of

    run, listing = open_run(folder)
    replaced = [Listed.of(file) for file in run.replaced()[0] if is_tagged(run, file)]
    listing = sorted([*listing, *replaced], key=lambda listed: listed.summary.sequence)
    records = [record_of(listed) for listed in listing]
    known = tags_of(run)
    tags = [[tag.name for tag in known if tag.refers_to(listed.summary)] for listed in listing]
    if as_json:
        output.print_json(
            [
                {**record.to_json(), "tags": names, "replaced": listed in replaced}
                for listed, record, names in zip(listing, records, tags, strict=True)
            ]
        )
        return
    table = output.Table(
        *("step", "tags", "parent", "size", "ratio", "weights", "degradation", "limit", "configuration", "found by"),
        optional=("found by", "configuration", "limit", "weights", "ratio"),
    )
    for listed, record, names in zip(listing, records, tags, strict=True):
        lost, chosen = record.degradation, record.configuration
        table.add(
            str(record.step),
            ", ".join(names),
            "replaced" if listed in replaced else "keyframe" if record.parent is None else str(record.parent),
            in_bytes(record.total.stored),
            f"{record.ratio:.2f}×",
            _ratio(record.roles["weight"]) if "weight" in record.roles else "–",
            "–" if lost is None else f"{lost:+.2%}",
            "–" if lost is None or record.limit is None else f"{max(record.limit, 0):.2%}",
            in_short(chosen) if chosen else "exact",
            record.search or "–",
        )
    output.print_(table)
    whole = sum((record.total for record in records), Size())
    weights = sum((record.roles.get("weight", Size()) for record in records), Size())
    output.print_(
        f"{plural(len(records), 'checkpoint')}: {output.reduction(whole)}; weights: {output.reduction(weights)}"
    )
    for path in run.lossless_copy_paths():
        if (copy := open_if_exists(path)) is not None:
            output.print_(f"{path.name}, the lossless copy of a checkpoint: {in_bytes(copy.size)}")
    for path in checkpoint_paths(run.folder, FROZEN):
        output.print_(f"{path.name}, frozen parameters: {in_bytes(path.stat().st_size)}")


def show(
    folder: RunOrFile,
    step: Step = None,
    tensor: Annotated[
        str | None, typer.Option(help="Show the levels of this tensor, with their values and counts.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint: configuration, degradation, and the size of every tensor. Many scalars share a line."""
    from dynaquant.report.inspection import folded_name, scalars_folded, tensors_of
    from dynaquant.saving.record import Size, record_of

    if tensor is not None:
        _show_tensor(folder, step, tensor, as_json)
        return
    file = checkpoint(folder, step)
    record, tensors = record_of(file), tensors_of(file)
    if as_json:
        output.print_json({**record.to_json(), "tensors": [info.to_json() for info in tensors]})
        return
    output.print_(str(file.path))
    output.print_facts([*_place(file), *_facts(record)])
    _print_sizes("By role", ((info.role, info) for info in tensors))
    _print_sizes("Weights by layer type", ((info.layer_type, info) for info in tensors if info.role == "weight"))
    table = output.Table(
        *("Tensor", "dtype", "shape", "coded as", "bins", "stored", "ratio", "bits per value"),
        optional=("bins", "dtype", "coded as", "ratio", "bits per value"),
    )
    for members in scalars_folded(tensors):
        info, size = members[0], sum((member.size for member in members), Size())
        table.add(
            folded_name(members),
            info.dtype,
            _shape(info),
            info.scheme,
            str(info.bins) if info.bins is not None else "–",
            in_bytes(size.stored),
            _ratio(size),
            f"{sum(member.bits for member in members) / len(members):.3f}",
        )
    output.print_(table)


def _print_sizes(title: str, grouped: Iterable[tuple[str, TensorInfo]]) -> None:
    """Print a table of groups of tensors, given by the name of the group."""
    from dynaquant.saving.record import Size

    groups: dict[str, list[TensorInfo]] = {}
    for group, info in grouped:
        groups.setdefault(group, []).append(info)
    table = output.Table(
        *(title, "tensors", "values", "raw", "stored", "ratio", "bits per value"), optional=("values", "tensors")
    )
    for group, members in groups.items():
        size, elements = sum((info.size for info in members), Size()), sum(info.elements for info in members)
        bits = f"{8 * size.stored / elements:.3f}" if elements else "–"
        sizes = in_bytes(size.raw), in_bytes(size.stored), _ratio(size), bits
        table.add(group, str(len(members)), f"{elements:,}", *sizes)
    if groups:
        output.print_(table)


def _place(file: CheckpointFile) -> Iterator[tuple[str, str]]:
    from dynaquant.store.run import is_of_run

    header, of_run = file.header, is_of_run(file)
    if of_run:  # a file that was written alone has no step
        yield "step", str(header.step)
    yield "identity", header.identity
    if header.parent is None:
        yield "parent", "none (keyframe)" if of_run else "none (it stands alone)"
    elif header.parent.file is None:
        yield "parent", f"step {header.parent.step}"
    else:
        where = header.parent.file and f"{header.parent.file} (from the folder of this file)"
        yield "parent", f"{where or 'a file object, which load must be given'}, identity {header.parent.identity}"


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    from dynaquant.engine.quantize.knobs import GridConfiguration, in_short

    yield "size", output.reduction(record.total)
    chosen = record.configuration
    if chosen is None:
        yield "configuration", "none (weights are stored exactly)"
    elif isinstance(chosen, GridConfiguration):
        rounding = "" if chosen.dithered else ", rounding to nearest"  # in_short says so of stochastic rounding
        yield "configuration", f"{in_short(chosen)}{rounding}: grid steps of 2^({chosen.scale}/16) / sqrt(F)"
    else:
        yield (
            "configuration",
            f"{chosen.bins} bins ({chosen.embedding_bins} for embeddings), {chosen.pruned:.0%} pruned by "
            f"{chosen.pruning_metric}, {chosen.protected:.2%} outliers by {chosen.protection_metric}",
        )
    spent = "" if not record.equivalents else f" in {record.equivalents:.1f} evaluations on all batches"
    yield "found by", f"{record.search or 'unknown'}, {plural(record.evaluations, 'configuration')} scored{spent}"
    if quality := record.quality:
        if record.degradation is None:
            lost = "the metric does not see the weights"
        else:
            limit = "" if record.limit is None else f" (limit {max(record.limit, 0):.2%})"
            lost = f"degradation {record.degradation:+.2%}{limit}"
        yield "quality", f"{quality.original:.6g} in training, {quality.restored:.6g} as restored: {lost}"
    if record.budget_spent is not None:
        felt = "" if record.restores_felt is None else f"{record.restores_felt:.3%} now, "
        yield "budget", f"restores have cost {felt}{record.budget_spent:.3%} at the end of the training, as predicted"
        if record.budget_assumes is not None:
            yield "", record.budget_assumes
    yield "seconds", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in record.seconds.items()) or "unknown"
    for note in record.notes:
        yield "note", note


def _show_tensor(folder: Path, step: str | None, name: str, as_json: bool) -> None:
    from dynaquant.engine.forms.stored import form_of
    from dynaquant.report.inspection import tensors_of
    from dynaquant.store.chain import detect_run_changes, retry_if_run_changed
    from dynaquant.store.reading import load_tensor
    from dynaquant.store.run import Run

    def decoded() -> tuple[CheckpointFile, StoredTensor]:
        file = checkpoint(folder, step)
        chain = Run(file.path.parent).chain(file)
        with detect_run_changes(chain):
            return chain[0], load_tensor(chain, name)

    file, stored = retry_if_run_changed(decoded)
    info = next(info for info in tensors_of(file) if info.name == name)
    form = form_of(stored)
    one = form_of(form.in_one())
    counts = one.level_counts()
    if as_json:
        levels = [{"level": found.level, "value": found.value, "count": found.count} for found in counts or ()]
        output.print_json({**info.to_json(), **one.facts(), "levels": levels})
        return
    output.print_(f"{name}: {info.dtype}, {_shape(info)}, {info.scheme}, {info.bits:.3f} bits per value")
    if counts is None:
        output.print_(form.describe())
        return
    table = output.Table("level", "value", "count", "share", "")
    most = max((found.count for found in counts), default=0)
    for found in counts:
        value = "–" if found.value is None else f"{found.value:+.6g}"
        share = found.count / max(info.elements, 1)
        table.add(found.level, value, f"{found.count:,}", f"{share:.2%}", "█" * round(20 * found.count / most))
    output.print_(table)


def diff(
    folder: RunFolder,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="Step or tag of a checkpoint.", show_default=False)],
    after: Annotated[
        str,
        typer.Argument(metavar="AFTER", help="Step or tag of the checkpoint to compare with it.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: which tensors changed, how far they moved, how many values changed level.

    Levels can be compared if a tensor has the same grid in both checkpoints. A save changes the grid of a tensor if it
    finds another scale, or the tensor's gradients have changed.
    """
    from dynaquant.report.decoded import changes
    from dynaquant.store.chain import retry_if_run_changed

    run, _ = open_run(folder)

    def compared() -> list[Change]:
        old, new = checkpoint(folder, before), checkpoint(folder, after)
        count = len(new.header.entries)
        return list(output.with_progress(changes(run, old, new), f"comparing {before} and {after}", count))

    found = retry_if_run_changed(compared)
    if as_json:
        output.print_json([asdict(change) for change in found])
        return
    table = output.Table("tensor", "", "moved by", "values", "levels")
    for change in found:
        if change.kind != "same":
            shares = [change.moved, change.changed, change.migrated]
            table.add(change.name, change.kind, *("–" if share is None else f"{share:.2%}" for share in shares))
    same = sum(change.kind == "same" for change in found)
    if table:
        output.print_(table)
    output.print_(f"{plural(len(table), 'tensor')} changed, {same:,} identical")
    output.print_("values, levels: the share that changed; – where a tensor has no levels, or another grid than before")


def verify(folder: RunOrFile, as_json: AsJson = False) -> None:
    """Decode every checkpoint of a run, or one file, and compare all values with their hashes.

    The exit code is 1 if a checkpoint is damaged, or could not be read.
    """
    from dynaquant.store.pointers import Pointer, found_at
    from dynaquant.store.verifying import damage_of_file, verify_run

    pointer = found_at(folder)
    if isinstance(pointer, Pointer) or folder.is_file():
        error = damage_of_file(pointer.file().path if isinstance(pointer, Pointer) else folder)
        _print_verified(int(error is None), [] if error is None else [error], as_json, of_run=False)
        return
    run, broken = run_of(folder)
    summaries = run.summaries()[0]
    found = dict(output.with_progress(verify_run(run), "verifying", len(summaries)))
    failed = [*broken, *(error for summary in summaries if (error := found.get(summary.step)) is not None)]
    replaced, broken = run.replaced()
    errors = [*broken, *filter(None, (damage_of_file(file.path) for file in replaced))]
    sound = sum(error is None for error in found.values()) + len(replaced) + len(broken) - len(errors)
    _print_verified(sound, [*failed, *errors], as_json)


def _print_verified(sound: int, failed: list[CheckpointError], as_json: bool, of_run: bool = True) -> None:
    from dynaquant.store.verifying import may_be_sound

    unreadable = [str(error) for error in failed if may_be_sound(error)]
    damaged = [str(error) for error in failed if not may_be_sound(error)]
    if as_json:
        output.print_json({"sound": sound, "damaged": damaged, "unreadable": unreadable})
    else:
        for reason in damaged:
            output.print_(f"damaged: {reason}")
        for reason in unreadable:
            output.print_(f"not checked, as it cannot be read here: {reason}")
        count = sound + len(failed)
        decode = "decodes" if count == 1 else "decode"
        output.print_(f"{sound} of {plural(count, 'checkpoint')} {decode} to the values that were saved")
        if damaged:
            restored = "restore takes the newest of these; " if sound else ""
            delete = ", or delete it" if of_run else ""
            output.print_(f"{restored}put a damaged file back from a copy{delete}")
    if failed:
        raise typer.Exit(1)


def du(folder: RunFolder, as_json: AsJson = False) -> None:
    """Show the disk use of a run by kind of file (keyframes, deltas, ...) and by role (weights, moments, ...)."""
    from dynaquant.report.inspection import disk_use

    run, _ = open_run(folder)
    use = disk_use(run, run.files()[0])
    if as_json:
        output.print_json([asdict(part) for part in use])
        return
    table = output.Table("", "files", "on disk", "as tensors", "ratio")
    for part in use:
        raw = in_bytes(part.size.raw) if part.size.raw else "–"
        count = str(part.files) if part.files is not None else ""
        ratio = _ratio(part.size) if part.size.raw else "–"
        table.add(part.what, count, in_bytes(part.size.stored), raw, ratio)
    output.print_(table)


def report(
    folder: RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run: size, degradation, configuration, bits of every tensor, and time.

    The report is one HTML file that any browser shows offline.
    """
    from dynaquant.report.page import write_report

    must_not_exist(out, force)
    run, _ = open_run(folder)
    statistics = write_report(run, out, lambda files: output.with_progress(files, "reading headers", len(files)))
    count, size = len(statistics.rows), output.size_of(out)
    text = f"{out}: {plural(count, 'checkpoint')}, {in_bytes(size)}"
    output.print_result(as_json, text, out=str(out), checkpoints=count, bytes=size)


def _shape(info: TensorInfo) -> str:
    return "×".join(map(str, info.shape)) or "scalar"


def _ratio(size: Size) -> str:
    return f"{size.ratio:.1f}×" if size.stored else "–"
