"""Finds what no checkpoint of a run needs: replaced checkpoints without a tag, frozen parameters, folders of parts."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from dynaquant.store import frozen_files
from dynaquant.store.layout import FOLDER as PARTS
from dynaquant.store.listing import checkpoint_paths
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
    named = {(tag.step, tag.identity) for tag in tags_of(run)} if replaced else set()
    found = []
    for file in replaced:
        checkpoint = (file.header.step, file.header.identity)
        if checkpoint in in_place or checkpoint not in named:
            found.append(file.path)
        else:
            summaries.append(file.header.summary)
    if broken or broken_too:
        return found
    frozen = {frozen_files.file_name(identity) for summary in summaries for identity in summary.frozen}
    for path in checkpoint_paths(run.folder, frozen_files.PREFIX):
        if frozen_files.is_frozen_name(path.name) and path.name not in frozen:
            found.append(path)
    parts = {summary.parts for summary in summaries} | set(unfinished)
    for path in run.folder.glob(f"{PARTS}*"):
        if path.name not in parts and _PARTS_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            found.append(path)
    return found
