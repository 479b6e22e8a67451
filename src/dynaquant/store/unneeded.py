"""Finds what no checkpoint of a run needs.

These are replaced checkpoints without a tag, lossless copies, frozen parameters and parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store.chain import FROZEN, frozen_name, is_frozen_name
from dynaquant.store.layout import FOLDER as PARTS
from dynaquant.store.layout import is_part_name, part_name
from dynaquant.store.run import EXACT_WEIGHTS, Run, checkpoint_paths
from dynaquant.store.tags import tags_of


def unneeded(run: Run, parts_begun: bool) -> list[Path]:
    """Return the files that the writer of a run may delete.

    parts_begun: whether parts are being written that no checkpoint refers to yet. Then no parts are found. While a
    checkpoint cannot be read, only replaced checkpoints are found, because it may need any of the others; while a tag
    cannot be read, nothing.
    """
    summaries, broken = run.summaries()
    replaced, broken_too = run.replaced()
    in_place = {(summary.step, summary.identity) for summary in summaries}
    try:
        named = {(tag.step, tag.identity) for tag in tags_of(run)}
    except CheckpointError:  # a tag that cannot be read now may name any of them
        return []
    copies = {run.copy_path(summary) for summary in summaries[-1:]} | _copies_of_weights(run, named)
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
    frozen = {frozen_name(identity) for summary in summaries for identity in summary.frozen}
    for path in checkpoint_paths(run.folder, FROZEN):
        if is_frozen_name(path.name) and path.name not in frozen:
            found.append(path)
    if not parts_begun:
        parts = {part_name(address) for summary in summaries for address in summary.parts}
        there = checkpoint_paths(run.folder / PARTS, "")
        found += [path for path in there if is_part_name(path.name) and path.name not in parts]
    return found


def _copies_of_weights(run: Run, named: Iterable[tuple[int, str]]) -> set[Path]:
    """Return the paths of copies of the weights of checkpoints that a tag names. named: steps and identities."""
    found = set()
    for step, identity in named:
        with suppress(CheckpointError):  # a tag may outlive its checkpoint
            header = run.holding(step, identity).header
            if header.record.get(EXACT_WEIGHTS):
                found.add(run.copy_path(header))
    return found
