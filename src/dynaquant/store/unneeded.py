"""Finds what no checkpoint of a run needs.

These are replaced checkpoints without a tag, lossless copies, frozen parameters and folders of parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store import frozen_files
from dynaquant.store.layout import FOLDER as PARTS
from dynaquant.store.listing import checkpoint_paths
from dynaquant.store.lossless_copies import EXACT_WEIGHTS, copy_path
from dynaquant.store.run import Run
from dynaquant.store.tags import tags_of

_PARTS_NAME = re.compile(rf"{PARTS}\d{{12,}}-\d{{12,}}-[0-9a-f]{{8}}")


def unneeded(run: Run, unfinished: Collection[str]) -> list[Path]:
    """Return the files and folders that the writer of a run may delete.

    unfinished: names of folders whose parts are being written. While a checkpoint cannot be read, only replaced
    checkpoints are found, because it may need any of the others.
    """
    summaries, broken = run.summaries()
    replaced, broken_too = run.replaced()
    in_place = {(summary.step, summary.identity) for summary in summaries}
    named = {(tag.step, tag.identity) for tag in tags_of(run)}
    copies = {copy_path(run.folder, summary) for summary in summaries[-1:]} | _copies_of_weights(run, named)
    found = []
    for file in replaced:
        checkpoint = (file.header.step, file.header.identity)
        if checkpoint in in_place or checkpoint not in named:
            found.append(file.path)
        else:
            summaries.append(file.header.summary)
    if broken or broken_too:
        return found
    found += [path for path in run.lossless_copy_paths() if path not in copies]
    frozen = {frozen_files.file_name(identity) for summary in summaries for identity in summary.frozen}
    for path in checkpoint_paths(run.folder, frozen_files.PREFIX):
        if frozen_files.is_frozen_name(path.name) and path.name not in frozen:
            found.append(path)
    parts = {summary.parts for summary in summaries} | set(unfinished)
    for path in run.folder.glob(f"{PARTS}*"):
        if path.name not in parts and _PARTS_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            found.append(path)
    return found


def _copies_of_weights(run: Run, named: Iterable[tuple[int, str]]) -> set[Path]:
    """Return the paths of copies of the weights of checkpoints that a tag names. named: steps and identities."""
    found = set()
    for step, identity in named:
        with suppress(CheckpointError):  # a tag may outlive its checkpoint
            header = run.holding(step, identity).header
            if header.record.get(EXACT_WEIGHTS):
                found.add(copy_path(run.folder, header))
    return found
