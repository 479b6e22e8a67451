"""Commands that change a run: ``tag``, ``compact``, ``prune``; or start one from it: ``branch``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaquant.cli import output
from dynaquant.cli.arguments import AsJson, RunFolder, Step, checkpoint, open_run
from dynaquant.formatting import in_bytes, plural

if TYPE_CHECKING:
    from dynaquant.store.retention import Retention
    from dynaquant.store.run import Run


def tag(
    folder: RunFolder,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the tag; without it, all tags are listed.")
    ] = None,
    step: Step = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the tag; the checkpoint stays.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Move the tag if another checkpoint has it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a checkpoint a name, list the tags, or delete one.

    Commands accept a tag wherever they accept a step. prune never deletes a checkpoint that has a tag.
    """
    from dynaquant.store.tags import is_tagged, remove_tag, set_tag, tags_of

    run, _ = open_run(folder)
    if delete and name is None:
        raise typer.BadParameter("--delete needs the name of a tag")
    if name is None:
        known = tags_of(run)
        if as_json:
            output.print_json([asdict(found) for found in known])
        else:
            replaced = {found for found in known for file in run.replaced()[0] if found.refers_to(file.header)}
            again = dict.fromkeys(replaced, ", the checkpoint before the step was saved again")
            lines = [f"{found.name}: step {found.step}{again.get(found, '')}" for found in known]
            output.print_("\n".join(lines) or "no tags")
    elif delete:
        remove_tag(run, name)
        unneeded = any(not is_tagged(run, file) for file in run.replaced()[0])
        kept = "the next save or prune deletes its checkpoint, whose step was saved again" if unneeded else None
        output.print_result(as_json, f"deleted the tag {name}; {kept or 'its checkpoint stays'}", deleted=name)
    else:
        made = set_tag(run, name, checkpoint(folder, step), force)
        output.print_result(as_json, f"{made.name}: step {made.step}", **asdict(made))


def branch(
    folder: RunFolder,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Step or tag of the checkpoint to start from.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of the new run.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Start a new run with a copy of a checkpoint, to continue training from there with other settings."""
    from dynaquant.store.chain import retry_if_run_changed
    from dynaquant.store.recoding import branch as branch_run

    run, _ = open_run(folder)
    written = retry_if_run_changed(lambda: branch_run(run, checkpoint(folder, step), new))
    text = f"{new}: starts with step {written.header.step}, {in_bytes(written.size)}"
    text += "; a Checkpointer for this folder restores it"
    output.print_result(as_json, text, run=str(new), step=written.header.step, bytes=written.size)


def compact(
    folder: RunFolder,
    keyframe_every: Annotated[
        int,
        typer.Option(
            help="Checkpoints from one keyframe to the next. More are smaller, fewer are faster to restore.", min=1
        ),
    ] = 16,
    as_json: AsJson = False,
) -> None:
    """Re-code all checkpoints of a run, for smaller files or faster restores. All values stay the same."""
    from dynaquant.store.commit import WritableRun
    from dynaquant.store.recoding import compact as compact_run

    run, listing = open_run(folder)
    before = sum(listed.size for listed in listing)
    with (writable := WritableRun(run.folder)).locked():
        for _ in output.with_progress(compact_run(writable, keyframe_every), "re-coding", len(listing)):
            pass
    left = run.listing()[0]
    keyframes = sum(listed.summary.parent is None for listed in left)
    after = sum(listed.size for listed in left)
    text = f"{plural(len(left), 'checkpoint')}, {plural(keyframes, 'keyframe')}: "
    text += output.change(before, after)
    output.print_result(as_json, text, checkpoints=len(left), keyframes=keyframes, bytes=after, before=before)


def prune(
    folder: RunFolder,
    keep_last: Annotated[int | None, typer.Option(help="Keep this many of the newest checkpoints.", min=1)] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep all checkpoints whose step is a multiple of this.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old checkpoints; checkpoints with a tag stay.

    A kept checkpoint is re-coded if it depends on a deleted one. Its values stay the same.
    """
    from dynaquant.options import Keep
    from dynaquant.store.commit import WritableRun
    from dynaquant.store.retention import Retention, steps_to_delete
    from dynaquant.store.retention import prune as prune_run

    if keep_last is None and keep_every is None:
        raise typer.BadParameter("give --keep-last, --keep-every, or both")
    run, listing = open_run(folder)
    retention = Retention(Keep(last=keep_last, every=keep_every))
    before = sum(listed.size for listed in listing)
    known = run.steps()
    if dry_run:
        damaged = _damaged(run, retention)
        steps = steps_to_delete(run, retention, damaged)
        left = [step for step in known if step not in steps]
        text = f"would delete {output.list_of(steps)}, keep {_kept(run, left, retention, damaged)}"
        output.print_result(as_json, text, deleted=steps, kept=left, dry_run=True)
        return
    with (writable := WritableRun(run.folder)).locked():
        damaged = _damaged(run, retention)
        notes = prune_run(writable, retention, damaged)
    listing = run.listing()[0]
    left = [listed.summary.step for listed in listing]
    deleted = [step for step in known if step not in left]
    after = sum(listed.size for listed in listing)
    text = f"deleted {output.list_of(deleted)}; kept {_kept(run, left, retention, damaged)}, "
    text += output.change(before, after)
    output.print_result(as_json, text, deleted=deleted, kept=left, bytes=after, before=before, notes=notes)
    for note in notes:
        output.print_error(f"dynaquant: {note}")
    if notes:
        raise typer.Exit(1)


def _kept(run: Run, steps: list[int], retention: Retention, damaged: set[int]) -> str:
    """Format which steps are kept, and why: ``3 (100, 200: a multiple of 100; 250: tag best)``."""
    from dynaquant.store.tags import tags_of

    summaries, known = run.summaries()[0], tags_of(run)
    tags = {summary.step: [tag.name for tag in known if tag.refers_to(summary)] for summary in summaries}
    usable = [summary.step for summary in summaries if summary.step not in damaged]
    newest = usable[-(retention.keep.last or 1) :]

    def why(step: int) -> str:
        if tags.get(step):
            return f"tag {', '.join(tags[step])}"
        if (every := retention.keep.every) and step % every == 0:
            return f"a multiple of {every}"
        if step in newest:
            return "among the newest"
        return "damaged, but newer" if step in damaged else "another one needs it"

    by_reason: dict[str, list[str]] = {}
    for step in sorted(steps):
        by_reason.setdefault(why(step), []).append(str(step))
    listed = "; ".join(f"{', '.join(found)}: {reason}" for reason, found in by_reason.items())
    return f"{len(steps)} ({listed})" if steps else "none"


def _damaged(run: Run, retention: Retention) -> set[int]:
    from dynaquant.store.retention import damaged_among_kept

    return damaged_among_kept(
        run, retention, lambda steps: output.with_progress(steps, "verifying what stays", len(steps))
    )
