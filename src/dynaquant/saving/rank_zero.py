"""The parts of a save that only rank 0 does.

Every rank captures its state, takes part in the search, and comes to the same decision. Rank 0 alone holds the run for
writing. It also assembles the tensors and writes the file, unless all ranks write parts (``commit_stage.py``). The
other ranks contribute the states of their random number generators.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaquant.errors import CheckpointError
from dynaquant.formatting import plural
from dynaquant.ranks.group import Group
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import chain_lengths
from dynaquant.store.tags import set_tag, tags_of
from dynaquant.training.collect import rank_rng_state
from dynaquant.training.packed import joined, packed

log = logging.getLogger("dynaquant")

SECONDS_TO_APPEAR = 3.0
"""How long a rank looks for a file that rank 0 has just written."""


def hold_for_writing(run: WritableRun, lock: ExitStack, group: Group) -> None:
    """Take the run's lock on rank 0. Closing ``lock`` releases it. Collective.

    Raises CheckpointError if another process or Checkpointer holds the run, or a rank does not see its folder.
    """
    group.on_rank_0(lambda: lock.enter_context(run.locked()))
    _check_shared(run, group)


def _check_shared(run: WritableRun, group: Group) -> None:
    """Raise CheckpointError unless all ranks see the folder that rank 0 has locked. Collective.

    Rank 0 writes a file with a random name there, which the others look for.
    """
    if group.size == 1:
        return
    token = run.folder / group.made_by_rank_0(run.leave_token)
    try:
        sees = group.run_on_all_ranks(lambda: _appears(token))
        found = group.all_gather((sees, socket.gethostname(), str(run.folder.absolute())))
    finally:
        group.on_rank_0(lambda: token.unlink(missing_ok=True))
    blind = [(rank, host, folder) for rank, (sees, host, folder) in enumerate(found) if not sees]
    if blind:
        rank, host, folder = blind[0]
        more = f" (nor do {len(blind) - 1} other ranks)" if len(blind) > 1 else ""
        raise CheckpointError(
            f"{folder} on {host} is not the folder that rank 0 writes to, which is {found[0][2]} on {found[0][1]}: "
            f"rank {rank} does not see what rank 0 has written there{more}. Give all ranks one folder on a file system "
            "that they share (such as NFS or Lustre)"
        )


def _appears(path: Path) -> bool:
    """Whether a file is there, or is soon: a network file system may show it a little later."""
    end = time.monotonic() + SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def keep_earlier_training(run: WritableRun, group: Group) -> None:
    """If the run has checkpoints already, warn, and tag the newest and those with a tag, so that they stay.

    Called before the first save of a training that has restored none. A tag may move with the new training, so a
    checkpoint that has one gets another.
    """
    if group.rank > 0 or not (found := run.summaries()[0]):
        return
    usable = {checkpoint.step for checkpoint in chain_lengths(found)}
    kept = {(summary.step, summary.identity) for summary in [known for known in found if known.step in usable][-1:]}
    kept |= {(tag.step, tag.identity) for tag in tags_of(run)}
    names = []
    for step, identity in sorted(kept):
        with suppress(CheckpointError):  # a tag may outlive its checkpoint
            names.append(set_tag(run, f"earlier-{step}-{identity[:8]}", run.holding(step, identity)).name)
    log.warning(
        "%s holds %s, but none was restored: another training begins in this run. The newest of them and "
        "those with a tag stay: %s. Others are replaced by steps of the same number, or deleted as keep "
        "says. To continue the earlier training, stop now, and restore one of these tags; to keep "
        "all of it, give another folder",
        run.folder,
        plural(len(found), "checkpoint"),
        ", ".join(names) or "none can be read",
    )


def rng_states_of_other_ranks(objects: Mapping[str, Any], group: Group) -> Tensor | None:
    """Return the states of the random number generators of rank 1, 2, …, joined; None if there are none. Collective.

    Rank 0 alone gets the values: the other ranks get a tensor of zeros of the same shape, which takes no memory. The
    states of rank 0 are in its collected state already.
    """
    if group.size == 1:
        return None
    own = group.run_on_all_ranks(lambda: packed(rank_rng_state(objects)) if group.rank > 0 else b"")
    states = group.gather_to_rank_0(own)
    found = joined(states[1:]) if group.rank == 0 else None
    size = group.from_rank_0(0 if found is None else len(found))
    return torch.zeros(1, dtype=torch.uint8).expand(size) if found is None else found
