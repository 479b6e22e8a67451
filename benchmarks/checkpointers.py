"""Checkpoints of a training by each method: dynaquant's own Checkpointer, and peers with a search around them.

A method is attached to a training at its first step. It restores its last checkpoint, and then saves. Peers store every
checkpoint with the smallest settings that are good enough. Moments and buffers that a peer does not store are stored
exactly, as byte planes and zstd.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

from peers import body
from peers.bitsnap import BITSNAP
from peers.check_n_run import CHECK_N_RUN
from peers.excp import EXCP
from peers.lc_checkpoint import LC_CHECKPOINT
from peers.paddlenlp import O1, O2
from peers.peer import Checkpoint, Encoded, Known, Peer
from peers.qd_compressor import QD_COMPRESSOR
from torch import Tensor
from workloads import Workload

import dynaquant as dq
from dynaquant.search.evaluation import degradation
from dynaquant.search.live_model import score

MOMENTS = {"first": ("exp_avg", "momentum_buffer"), "second": ("exp_avg_sq",)}


@dataclass(frozen=True)
class Saved:
    """One checkpoint by one method. equivalents: evaluations, with those of the weights in training.

    weights, state: raw and stored bytes of the weights and of the whole checkpoint; weights is None if the method does
    not store them separately. degradation: of the weights. blocked: seconds that training waited for quantizing and
    searching; coding and writing can be done in the background. how: the settings.
    """

    step: int
    weights: tuple[int, int] | None
    state: tuple[int, int]
    degradation: float
    evaluations: int
    equivalents: float
    blocked: float
    how: str

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Saved:
        """Return the inverse of ``asdict`` and JSON. JSON has no tuples."""
        weights = stored["weights"]
        return cls(**{**stored, "state": tuple(stored["state"]), "weights": weights and tuple(weights)})


class Checkpoints(Protocol):
    """Checkpoints of one training by one method."""

    def attach(self, work: Workload) -> int:
        """Restore the last checkpoint into a training. Returns its step, or 0 if there is none."""

    def save(self, step: int) -> Saved:
        """Save a checkpoint of the training."""

    def close(self) -> None:
        """Release what the method holds."""


def equivalents(record: dq.Record) -> float:
    """Return what a save has spent on the metric, in evaluations, with that of the weights in training."""
    known = getattr(record, "equivalents", None)
    return float((record.evaluations and record.evaluations + 1) if known is None else known)


class Ours:
    """dynaquant's Checkpointer. settings: its arguments."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._checkpointer: dq.Checkpointer | None = None

    def attach(self, work: Workload) -> int:
        """Restore as a new process would after a crash: only the folder is left."""
        self.close()
        optimizers = work.optimizers if len(work.optimizers) > 1 else work.optimizer
        schedulers = {f"scheduler{i or ''}": scheduler for i, scheduler in enumerate(work.schedulers)}
        extras = {**schedulers, "data": work.generator}
        self._checkpointer = dq.Checkpointer(
            self._folder, work.model, optimizers, extras=extras, evaluate=work.search_loss, **self._settings
        )
        return self._checkpointer.restore() or 0

    def save(self, step: int) -> Saved:
        """Save, and wait for the write, so that methods do not disturb each other."""
        assert self._checkpointer is not None
        start = perf_counter()
        future = self._checkpointer.save(step)
        blocked = perf_counter() - start
        record = future.result()
        weights = record.roles["weight"]
        return Saved(
            record.step,
            (weights.raw, weights.stored),
            (record.total.raw, record.total.stored),
            record.quality.degradation if record.quality else 0.0,
            record.evaluations,
            equivalents(record),
            blocked,
            str(record.configuration),
        )

    def close(self) -> None:
        """Wait for the last write."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def checkpoint_of(work: Workload) -> Checkpoint:
    """Return a copy of a training's state."""
    parameters = dict(work.model.named_parameters())
    found = Checkpoint(
        {name: parameter.detach().clone() for name, parameter in parameters.items()},
        others={name: buffer.clone() for name, buffer in work.model.named_buffers()},
    )
    for group, keys in MOMENTS.items():
        for name, parameter in parameters.items():
            for state in (each.state.get(parameter, {}) for each in work.optimizers):
                for key in keys:
                    if key in state:
                        found.groups()[group][name] = state[key].clone()
    return found


def size(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of tensors in memory."""
    return sum(tensor.nbytes for tensor in tensors.values())


class Theirs:
    """A peer. It keeps in memory what its decoder would know after a crash; a crash loses its quantization errors."""

    def __init__(self, peer: Peer[Any], max_degradation: float) -> None:
        self._peer, self._limit, self._at = peer, max_degradation, 0
        self._work: Workload | None = None
        self._known: Known | None = None
        self._rest: tuple[int, Checkpoint, dict[str, Any]] | None = None

    def attach(self, work: Workload) -> int:
        """Restore. The first checkpoint is coded as differences to the initial weights, which follow from the seed."""
        self._work = work
        if self._known is None:
            self._known = Known(Checkpoint({name: p.detach().clone() for name, p in work.model.named_parameters()}))
        if self._rest is None:
            return 0
        step, checkpoint, plain = self._rest
        self._known = Known(self._known.checkpoint, self._known.levels)
        tensors = dict(work.model.named_parameters()) | dict(work.model.named_buffers())
        for name, value in (checkpoint.weights | checkpoint.others).items():
            tensors[name].data.copy_(value)
        for key in ("optimizers", "schedulers"):
            for each, state in zip(getattr(work, key), deepcopy(plain[key]), strict=True):
                each.load_state_dict(state)
        work.generator.set_state(plain["generator"])
        for name, parameter in work.model.named_parameters():
            for optimizer in work.optimizers:
                for group, keys in MOMENTS.items():
                    for key in keys:
                        if name in checkpoint.groups()[group] and key in optimizer.state.get(parameter, {}):
                            optimizer.state[parameter][key].copy_(checkpoint.groups()[group][name])
        return step

    def save(self, step: int) -> Saved:
        """Save with the smallest settings that are good enough, or the finest. Starts one below the last settings."""
        assert self._work is not None
        work, start = self._work, perf_counter()
        checkpoint = checkpoint_of(work)
        original = score(work.model, {}, work.search_loss)
        begin = self._at = max(self._at - 1, 0)
        while True:
            encoded = self._peer.encode(checkpoint, self._known, self._peer.space[self._at])
            found = score(work.model, encoded.known.checkpoint.weights, work.search_loss)
            worse = degradation(original, found, False)
            if worse <= self._limit or self._at == len(self._peer.space) - 1:
                break
            self._at += 1
        blocked = perf_counter() - start
        self._known = encoded.known
        stored, weights, decoded = self._packed(checkpoint, encoded)
        plain = {key: [each.state_dict() for each in getattr(work, key)] for key in ("optimizers", "schedulers")}
        self._rest = step, decoded, deepcopy({**plain, "generator": work.generator.get_state()})
        raw = sum(size(tensors) for tensors in checkpoint.groups().values())
        return Saved(
            step,
            None if weights is None else (size(checkpoint.weights), weights),
            (raw, stored),
            worse,
            self._at - begin + 1,
            self._at - begin + 2,
            blocked,
            str(self._peer.space[self._at]),
        )

    def _packed(self, checkpoint: Checkpoint, encoded: Encoded) -> tuple[int, int | None, Checkpoint]:
        """Return the bytes of the checkpoint, those of the weights if they are separate, and the decoded checkpoint."""
        peer, data = self._peer, encoded.pack()
        groups = checkpoint.groups()
        rest = {group: tensors for group, tensors in groups.items() if group not in peer.groups}
        exactly = sum(len(body.exact(tensors)) for tensors in rest.values())
        decoded = Checkpoint(**{group: encoded.known.checkpoint.groups()[group] for group in peer.groups}, **rest)
        return len(data) + exactly, len(data) if peer.groups == ("weights",) else None, decoded

    def close(self) -> None:
        """Do nothing: no file is open."""


PUBLISHED, DEFAULT = "dynaquant, published", "dynaquant"
METHODS: dict[str, Peer[Any] | Literal["published", "grid"]] = {
    "Check-N-Run+": CHECK_N_RUN,
    "QD-Compressor+": QD_COMPRESSOR,
    "LC-Checkpoint": LC_CHECKPOINT,
    "ExCP": EXCP,
    "BitSnap": BITSNAP,
    "PaddleNLP O1": O1,
    "PaddleNLP O2": O2,
    PUBLISHED: "published",
    DEFAULT: "grid",
}
"""Methods by name: peers, and dynaquant's two methods."""


def checkpoints_by(method: str, folder: Path, max_degradation: float, every: int) -> Checkpoints:
    """Return the checkpoints of a method by name. folder: an empty one. every: training steps between checkpoints."""
    found = METHODS[method]
    if isinstance(found, Peer):
        return Theirs(found, max_degradation)
    return Ours(folder, quality=dq.Quality(method=found, max_degradation=max_degradation), every=every)


def sources(method: str) -> list[Path]:
    """Return the source files of a method."""
    found = METHODS[method]
    if isinstance(found, Peer):
        return [Path(inspect.getfile(found.encode)), Path(body.__file__ or "")]
    return sorted(Path(dq.__file__).parent.rglob("*.py"))
