"""Compresses files of other programs into checkpoints: a single file, or a series of them into a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dynaquant import options
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.quantize.grid_weights import grid_weights
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.errors import CheckpointError
from dynaquant.interop import any_format
from dynaquant.interop.state_source import StateSubject, Tell, source_of
from dynaquant.interop.whole_state import WholeState
from dynaquant.methods.named import METHODS
from dynaquant.options import Quality, QualityName, quality_of
from dynaquant.ranks.group import Group
from dynaquant.saving.assemble import Compressed
from dynaquant.saving.compressor import Compressor
from dynaquant.saving.memory import Memory
from dynaquant.saving.presets import PRESETS
from dynaquant.saving.record import Record, json_of, record_of
from dynaquant.saving.source import Source
from dynaquant.search.evaluation import on_batches
from dynaquant.search.judge import MetricJudge
from dynaquant.search.metric import UserMetric
from dynaquant.search.sensitivity import measure_sensitivity
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.files import check_output, removing_empty_folders
from dynaquant.store.run import EXACT_WEIGHTS, Run, chain_lengths
from dynaquant.store.single_file import write_file
from dynaquant.store.writing import Base, Checkpoint

KEYFRAME_EVERY = options.KEYFRAME_EVERY // 2
"""Maximum number of checkpoints in a chain of packed files.

Half as many as in a training: a training mostly reads its newest checkpoint, but packed files are read in any order.
"""
Metric = Callable[[Any], float]
"""Scores a state, which it gets as ``dynaquant.load`` returns it; for a file of weights, the state dict."""


@dataclass(frozen=True)
class Packed:
    """The checkpoint of a state, and how it was decided."""

    checkpoint: Checkpoint
    compressed: Compressed

    def commit(self, run: WritableRun, base: Base | None) -> tuple[CheckpointFile, Base, Memory]:
        """Add the checkpoint to a run. Returns its file, and base and memory for the next one.

        base: it is conditioned on this one; None: it is a keyframe.
        """
        committed, own = run.commit(self.checkpoint, base)
        return committed, own, self.compressed.with_last_weights(own.tensors).memory


class Packer:
    """Makes checkpoints of states.

    quality: as for a ``Checkpointer``. metric: scores the state as it would be restored. The search uses it to choose
    the configuration; without a metric, it uses the distortion of the weights. tell: called with texts that report
    progress.

    F of a tensor comes from the optimizer's second moments if the state has them, else from the metric
    (``search/sensitivity.py``), else from the tensor's size.

    Raises ValueError for a metric of a lossless checkpoint.
    """

    def __init__(
        self,
        quality: QualityName | Quality = "balanced",
        metric: Metric | None = None,
        higher_is_better: bool = False,
        tell: Tell = lambda _text: None,
    ) -> None:
        self._quality = quality_of(quality)
        if PRESETS[self._quality.preset] is None and metric is not None:
            raise ValueError("a lossless checkpoint needs no metric")
        self._metric, self._higher_is_better, self._tell = metric, higher_is_better, tell
        self._measured: dict[str, float] = {}  # F by weight, as the metric tells
        self._measured_of: frozenset[str] = frozenset()  # the weights that were measured

    def source(self, state: WholeState, exact_optimizers: Mapping[str, str] | None = None) -> Source:
        """Return a state as a source: see ``state_source.source_of``."""
        vectors = METHODS[self._quality.chosen_method].quantizes_vectors
        return source_of(state, vectors, exact_optimizers or {})

    def packed(
        self,
        state: WholeState,
        step: int,
        memory: Memory | None = None,
        source: Source | None = None,
        interval: int | None = None,
        on_access: bool = False,
    ) -> Packed:
        """Return a state as a checkpoint.

        memory: of the checkpoint before; None if there is none. source: of the state, with what else is known; None for
        ``self.source(state)``. interval: steps of training since the last checkpoint, if known. on_access: whether its
        tensors are quantized on access, and not kept. A delta and what comes after it need all of them. Raises
        EvaluateError if the metric fails on the original state.
        """
        memory = Memory() if memory is None else memory
        source = self.source(state) if source is None else source
        seconds: dict[str, float] = {}
        group = Group(alone=True)  # other ranks may be elsewhere: rank 0 often saves alone
        subject = StateSubject(state, self._tell)
        metric = None
        if self._metric is not None:
            metric = UserMetric(subject, self._metric, self._higher_is_better, group)
            source = self._with_sensitivities(source, subject, self._metric)
        self._tell("reading and quantizing")
        found = Compressor(self._quality, metric, group).compress(source, memory, 1.0, seconds)
        count, labels = itertools.count(1), source.labels

        def stored(name: str) -> StoredTensor:
            self._tell(f"quantizing and writing: tensor {min(next(count), len(labels))} of {len(labels)}")
            return found.assembled.tensors[name]

        record = {**json_of(found.decision, interval, seconds, found.notes), "source": state.origin}
        if found.memory.budget is not None:
            record["training_budget"] = found.memory.budget.to_json()
        coder = METHODS[self._quality.chosen_method].coder
        copy = found.assembled.lossless_copy if found.decision.configuration is not None else None
        if copy is not None:
            record[EXACT_WEIGHTS] = True
        lazy = LazyMapping(labels, stored)
        checkpoint = Checkpoint(step, state.tree, lazy if on_access else dict(lazy), labels, record, coder, copy)
        return Packed(checkpoint, found)

    def _with_sensitivities(self, source: Source, subject: StateSubject, metric: Metric) -> Source:
        """Return a source whose F comes from the metric where nothing else is known."""
        preset = PRESETS[self._quality.preset]
        assert preset is not None
        # A save looks only at the batches of a metric, and not whether their mean is finite.
        checked = None if on_batches(metric) is None else subject.score({}, metric)

        def mean_squares(weights: Mapping[str, Tensor]) -> Mapping[str, float]:
            if not weights or (known := source.mean_squares(weights)):
                return known if weights else {}
            if self._measured_of != source.weight_names.keys():  # measured once for the same weights
                every = LazyMapping(source.weight_names, source.tensors.__getitem__)
                prepared = grid_weights(every, {}, {}, 0, step_limits=preset.step_limits, on_access=True)
                original = subject.score({}, metric) if checked is None else checked
                judge = MetricJudge(subject, metric, self._higher_is_better, original, {})
                self._measured = measure_sensitivity(prepared, lambda some: judge(some).degradation, self._tell)
                self._measured_of = frozenset(every)
            return {name: self._measured[name] for name in weights if name in self._measured}

        return replace(source, mean_squares=mean_squares)


def compress(source: Path, out: Path, packer: Packer, skip_objects: bool = False) -> Record:
    """Compress the file or folder of a model, or of a whole training state, into one file. Writes it atomically.

    skip_objects: as for ``any_format.read``.
    Raises CheckpointError if the source cannot be read, OSError if ``out`` cannot be written.
    """
    check_output(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise CheckpointError(f"{out} is the input file; give another name for the output")
    file = any_format.read(source, skip_objects)
    return record_of(write_file(out, packer.packed(file, 0, on_access=True).checkpoint))


def step_of(path: Path) -> int | None:
    """Return the last number in a file's name, e.g. 4000 for ``ckpt-4000.safetensors``.

    If it has none, the last number in the name of its folder, e.g. 500 for ``checkpoint-500/model.safetensors``; None
    if there is none either.
    """
    path = path.absolute()
    suffix = path.suffix if path.is_file() and not path.suffix[1:].isdecimal() else ""
    names = [path.name.removesuffix(suffix), *([path.parent.name] if path.is_file() else [])]
    found = (re.findall(r"\d+", name) for name in names)
    return next((int(numbers[-1]) for numbers in found if numbers), None)


def _check_packed(run: Run) -> None:
    """Raise CheckpointError if files cannot be packed into a run: a training saved to it, or it cannot be read."""
    summaries, broken = run.summaries()
    for error in broken:
        if isinstance(error.__cause__, OSError):
            raise error
    own = next((s.step for s in summaries if "source" not in run.file(s.step).header.record), None)
    if own is not None:
        raise CheckpointError(f"{run.folder}: step {own} was saved by a training; pack into another folder")


def pack(
    files: Mapping[int, Path], folder: Path, packer: Packer, skip_objects: bool = False
) -> Iterator[Record | None]:
    """Compress files into a run, in the order of their steps. Yields a record for each, None for steps already there.

    files: by step. skip_objects: as for ``any_format.read``. Raises CheckpointError if a file cannot be read or another
    process writes to the run; checkpoints that were packed before the error stay.
    """
    for step, path in files.items():
        if step >= 2**63:
            raise CheckpointError(f"{path}: {step} is too large for a step; rename it")
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
    run = WritableRun(folder)
    with removing_empty_folders(folder), run.locked():
        _check_packed(run)
        there = {
            known.step for known in chain_lengths(run.summaries()[0])
        }  # a checkpoint without its parents is packed again
        memory, base, chain = Memory(), None, 0
        for step, path in sorted(files.items()):
            if step in there:
                yield None
                continue
            file = any_format.read(path, skip_objects)
            state = replace(file, details={**file.details, "name": path.name})
            if chain == KEYFRAME_EVERY:
                base, chain = None, 0
            written, base, memory = packer.packed(state, step, memory).commit(run, base)
            chain += 1
            yield record_of(written)
