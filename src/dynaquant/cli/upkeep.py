"""Commands that change a run, or make another of it: ``tag``, ``branch``, ``compact``, ``prune``."""

# ruff: noqa: PLC0415
# Each command imports what it needs when it runs, so that --help does not load PyTorch, which takes seconds.

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaquant.cli import output
from dynaquant.cli.output import AsJson, RunFolder, Step
from dynaquant.formatting import in_bytes

if TYPE_CHECKING:
    from dynaquant.store.retention import Retention
    from dynaquant.store.run import Run


def tag(
    folder: RunFolder,
    name: Annotated[str | None, typer.Argument(help="The name; without it all tags are listed.")] = None,
    step: Step = None,
    delete: Annotated[bool, typer.Option("--delete", help="Take the name away.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Take the name from another checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Name a checkpoint; the name can be given wherever a step can, and what has one is never deleted by prune."""
    from dynaquant.store.tags import remove_tag, set_tag, tags_of

    run, _ = output.open_run(folder)
    if delete and name is None:
        raise typer.BadParameter("say which tag to delete")
    if name is None:
        known = tags_of(run)
        if as_json:
            output.print_json([asdict(found) for found in known])
        else:
            output.print_("\n".join(f"{found.name}: step {found.step}" for found in known) or "no tags")
    elif delete:
        remove_tag(run, name)
        output.report(as_json, f"{name} is no tag any more; its checkpoint is as it was", deleted=name)
    else:
        made = set_tag(run, name, output.checkpoint(folder, step), force)
        output.report(as_json, f"{made.name}: step {made.step}", **asdict(made))


def branch(
    folder: RunFolder,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Where to branch off: a step or a tag.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of the new run.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Begin a new run with a checkpoint of this one: train on from there with other settings, and keep both lines."""
    from dynaquant.store.chain import until_settled
    from dynaquant.store.recoding import branch as branch_run

    run, _ = output.open_run(folder)
    written = until_settled(lambda: branch_run(run, output.checkpoint(folder, step), new))
    text = f"{new}: begins with step {written.header.step}, {in_bytes(written.size)}"
    text += "; a Checkpointer for this folder goes on from there"
    output.report(as_json, text, run=str(new), step=written.header.step, bytes=written.size)


def compact(
    folder: RunFolder,
    keyframe_every: Annotated[
        int, typer.Option(help="Checkpoints in a chain of deltas: more are smaller, fewer faster to restore.", min=1)
    ] = 16,
    as_json: AsJson = False,
) -> None:
    """Code a run anew, after pruning or to trade size for speed of restoring. All values stay, bit for bit."""
    from dynaquant.store.recoding import compact as compact_run

    run, files = output.open_run(folder)
    before = sum(file.size for file in files)
    with run.writer():
        for _ in output.with_progress(compact_run(run, keyframe_every), "re-coding", len(files)):
            pass
    left = run.files()[0]
    keyframes = sum(file.header.parent is None for file in left)
    after = sum(file.size for file in left)
    text = f"{len(left)} checkpoints, {keyframes} of them keyframes: "
    text += f"{in_bytes(after)} instead of {in_bytes(before)}"
    output.report(as_json, text, checkpoints=len(left), keyframes=keyframes, bytes=after, before=before)


def prune(
    folder: RunFolder,
    keep_last: Annotated[int | None, typer.Option(help="Keep so many of the newest.", min=1)] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep every multiple of this step.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints; those that stay are re-coded where they depend on them, and keep their values.

    What has a tag stays.
    """
    from dynaquant.store.retention import Retention, superfluous
    from dynaquant.store.retention import prune as prune_run

    if keep_last is None and keep_every is None:
        raise typer.BadParameter("say what to keep: --keep-last, --keep-every, or both")
    run, files = output.open_run(folder)
    retention = Retention(keep_last, keep_every)
    before = sum(file.size for file in files)
    known = run.steps()
    if dry_run:
        steps = superfluous(run, retention, _damaged(run, retention))
        left = [step for step in known if step not in steps]
        text = f"would delete {output.steps(steps)}, keep {output.steps(left)}"
        output.report(as_json, text, deleted=steps, kept=left, dry_run=True)
        return
    with run.writer():
        notes = prune_run(run, retention, _damaged(run, retention))
    files = run.files()[0]
    left = [file.header.step for file in files]
    deleted = [step for step in known if step not in left]
    after = sum(file.size for file in files)
    text = f"deleted {output.steps(deleted)}; kept {output.steps(left)}, "
    text += f"{in_bytes(after)} instead of {in_bytes(before)}"
    output.report(as_json, text, deleted=deleted, kept=left, bytes=after, before=before, notes=notes)
    for note in notes:
        print(f"dynaquant: {note}", file=sys.stderr)
    if notes:
        raise typer.Exit(1)


def _damaged(run: Run, retention: Retention) -> set[int]:
    from dynaquant.store.retention import damaged_among_kept

    return damaged_among_kept(
        run, retention, lambda steps: output.with_progress(steps, "checking what stays", len(steps))
    )
