"""Compresses files of other programs into checkpoints: a single file, or a series of them into a run."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dynaquant import options
from dynaquant.engine.forms.form import Form, StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.averages import average_bounds
from dynaquant.engine.quantize.bounds import quantize_bounded
from dynaquant.engine.quantize.grid_weights import GridWeights, effective_fisher, grid_weights
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.tensors.codebook import Grid
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.errors import CheckpointError, EvaluateError
from dynaquant.interop import any_format, inferred_roles
from dynaquant.interop.going_on import GoingOn
from dynaquant.interop.model_file import ModelFile
from dynaquant.methods.grid.method import PreparedForGrid
from dynaquant.options import Quality, QualityName, quality_of
from dynaquant.ranks.group import Group
from dynaquant.saving.presets import PRESETS, largest_degradation
from dynaquant.saving.record import Record, json_of, record_of
from dynaquant.search.decision import Decision
from dynaquant.search.evaluation import Evaluate, score
from dynaquant.search.judge import MetricJudge
from dynaquant.search.manager import ConfigurationManager, Limits
from dynaquant.search.memory import SearchMemory
from dynaquant.search.sensitivity import measure_sensitivity
from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import tensor_names_in
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import Header
from dynaquant.store.files import check_output, removing_empty_folders
from dynaquant.store.run import Run
from dynaquant.store.single_file import FIRST_SEQUENCE, write_file
from dynaquant.store.writing import Base, Checkpoint

VECTOR_SENSITIVITY = 64.0
"""Sensitivity of the loss to vectors (biases, norms) relative to matrices, if neither is measured. One value of a norm
multiplies a whole channel, and all vectors together are hardly a percent of a model."""
KEYFRAME_EVERY = options.KEYFRAME_EVERY // 2
"""Maximum number of checkpoints in a chain of packed files.

Half as many as in a training: a training mostly reads its newest checkpoint, but packed files are read in any order.
"""
_PREFIX = "model."  # the configuration manager expects names of a model's weights to begin with it

Metric = Callable[[Any], float]
"""Scores a state, which it gets as ``dynaquant.load`` returns it; for a file of weights, the state dict."""
Tell = Callable[[str], None]


class StreamedWeights(GridWeights):
    """Weights that are quantized on access, one by one, so that they need not fit into memory."""

    def quantize(self, configuration: GridConfiguration) -> Mapping[str, QuantizedTensor]:
        """Return the quantized weights by name. Every access quantizes again."""
        rounded = self.candidate(configuration)
        return LazyMapping(rounded, lambda name: rounded[name].begin_quantize()())


class _Holder(nn.Module):
    """A module whose parameters are the weights of a state. Their names may contain dots."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = {name: nn.Parameter(weights[name]) for name in weights}


class Packer:
    """Makes checkpoints of one state, or of a series of states.

    quality: its preset and ``max_degradation`` count. metric: scores the state as it would be restored. The search uses
    it to choose the configuration; without a metric, it uses the distortion of the weights. tell: called with texts
    that report progress. training: if the states are those of a training that goes on from its checkpoints.

    The loss's sensitivity to a tensor comes from the optimizer's second moments if the state has them, else from the
    metric (``search/sensitivity.py``), else from the tensor's size.

    Raises ValueError for a metric of a lossless checkpoint.
    """

    def __init__(
        self,
        quality: QualityName | Quality = "balanced",
        metric: Metric | None = None,
        higher_is_better: bool = False,
        tell: Tell = lambda _text: None,
        training: GoingOn | None = None,
    ) -> None:
        quality = quality_of(quality)
        self._preset = PRESETS[quality.preset]
        if self._preset is None and metric is not None:
            raise ValueError("a lossless checkpoint needs no metric")
        self._limit = largest_degradation(quality)
        self._metric, self._higher_is_better, self._tell = metric, higher_is_better, tell
        self._training = GoingOn() if training is None else training
        self._memory = SearchMemory()
        self._last: dict[str, int] = {}  # rungs of the previous checkpoint
        self._probed: dict[str, float] = {}

    def continue_from(self, header: Header, tensors: Mapping[str, StoredTensor]) -> None:
        """Take up a series after this checkpoint. tensors: as stored."""
        self._memory = SearchMemory.from_record(header.record, {})
        grids = {name: t.codebook for name, t in tensors.items() if isinstance(t, QuantizedTensor)}
        self._last = {_PREFIX + name: grid.rung for name, grid in grids.items() if isinstance(grid, Grid)}

    def checkpoint(self, file: ModelFile, step: int) -> Checkpoint:
        """Return the checkpoint of a state. Its tensors are quantized on access, and not kept.

        Raises EvaluateError if the metric fails on the original state.
        """
        start = time.perf_counter()
        labels = inferred_roles.labels(file.tree, file.tensors, file.weights, file.averages)
        labels |= {name: Label("exact") for name in labels if self._training.keeps_exactly(name)}
        decision = Decision("lossless", None, memory=self._memory)
        others: Mapping[str, Form] = {}
        notes: list[str] = []
        if self._preset is not None:
            decision, notes = self._decide(file, labels)
            notes += [
                f"the moments of {name} are stored exactly, as they may not be used as Adam does: {reason}"
                for name, reason in self._training.exact_optimizers.items()
            ]
            self._tell("quantizing the optimizer's state")
            first, second = self._preset.first_tolerance, self._preset.second_tolerance
            moments = quantize_moments(file.tensors, labels, first, second, self._training.first_tolerances)
            averages = {name: file.tensors[name] for name, label in labels.items() if label.role == "average"}
            bounds = average_bounds(averages, self._preset.average_error)
            others = {**moments, **quantize_bounded(averages, bounds)}
        seconds = {"search": time.perf_counter() - start}
        weights = decision.quantized if decision.configuration is not None else {}
        count = itertools.count(1)

        def stored(name: str) -> StoredTensor:
            self._tell(f"writing and reading back: {min(next(count), 2 * len(labels)) * 50 // len(labels)} %")
            inside = _PREFIX + name
            return weights[inside] if inside in weights else others.get(name) or file.tensors[name]

        record = {
            **json_of(decision, self._training.interval, seconds, [*file.notes, *notes]),
            "source": file.source,
        }
        if self._training.budget is not None:
            record["training_budget"] = self._training.budget.to_json()
        return Checkpoint(step, file.tree, LazyMapping(labels, stored), labels, record)

    def _decide(self, file: ModelFile, labels: Mapping[str, Label]) -> tuple[Decision, list[str]]:
        assert self._preset is not None
        limits = self._preset.step_limits
        self._tell("reading the weights")
        names = {_PREFIX + name: name for name, label in labels.items() if label.role == "weight"}
        weights = LazyMapping(names, lambda inside: file.tensors[names[inside]])
        # If weights are not in the model's order, moments could be matched with the wrong weights.
        fisher = inferred_roles.mean_squared_gradients(file.tree, file.tensors, labels) if file.in_order else {}
        measured = {_PREFIX + name: value for name, value in fisher.items()}
        holder = _Holder(LazyMapping(names.values(), file.tensors.__getitem__) if self._metric else {})
        evaluate = self._evaluate_on(file) if self._metric else None
        prior = measured
        if evaluate is not None:
            original = _score_of_original(holder, evaluate)
            if not measured:
                judge = MetricJudge(holder, evaluate, self._higher_is_better, original, {})
                measured = prior = self._probe(_streamed(grid_weights(weights, {}, {}, 0, step_limits=limits)), judge)
        grid = grid_weights(weights, prior, self._last, self._training.restored_step, step_limits=limits)
        if not prior:
            prior = {name: _by_size(grid, name) for name in grid.weights}
            grid = replace(grid, fisher=effective_fisher(grid.sizes, grid.squares, prior))
        prepared = PreparedForGrid(_streamed(grid), bool(measured))
        limit = self._training.allowed(self._limit)
        group = Group(alone=True)  # other ranks may be elsewhere: rank 0 often saves alone
        manager = ConfigurationManager(holder, evaluate, self._higher_is_better, None, group)
        restored = {_PREFIX + name: tensor for name, tensor in self._training.restored.items()}
        memory = replace(self._memory, restored=restored)
        decision = manager.decide(prepared, {}, memory, Limits(limit, self._limit))
        self._memory = decision.memory
        if not decision.memory.restored:
            self._training.restored = {}
        if isinstance(decision.configuration, GridConfiguration):
            self._last = prepared.grid.rungs(decision.configuration)
        return decision, [note.removeprefix(_PREFIX) for note in grid.notes]

    def _evaluate_on(self, file: ModelFile) -> Evaluate:
        """Return a function that scores the state with the parameters of a ``_Holder`` as its weights."""
        metric, tensors = self._metric, file.tensors
        assert metric is not None
        count = itertools.count(1)

        def evaluate(holder: nn.Module) -> float:
            self._tell(f"evaluating: {next(count)}")
            weights = {name: parameter.detach() for name, parameter in holder.named_parameters(remove_duplicate=False)}
            # Copies, as the metric may write to them. The weights are copies already.
            others = {name: tensors[name].clone() for name in tensor_names_in(file.tree) if name not in weights}
            return metric(unflatten(file.tree, {**others, **weights}))

        return evaluate

    def _probe(self, weights: GridWeights, judge: MetricJudge) -> dict[str, float]:
        """Return the measured sensitivity to each tensor. In a series, it is measured once for each set of tensors."""
        if self._probed.keys() != weights.weights.keys():
            self._probed = measure_sensitivity(weights, lambda quantized: judge(quantized).degradation, self._tell)
        return self._probed


def _score_of_original(holder: nn.Module, evaluate: Evaluate) -> float:
    try:
        found = score(holder, {}, evaluate)
    except Exception as error:
        raise EvaluateError(f"the metric failed on the original weights ({error!r})") from error
    if not math.isfinite(found):
        raise EvaluateError(f"the metric of the original weights is {found}; it must be finite")
    return found


def _streamed(grid: GridWeights) -> StreamedWeights:
    return StreamedWeights(**{field.name: getattr(grid, field.name) for field in fields(grid)})


def _by_size(grid: GridWeights, name: str) -> float:
    tensor = grid.weights[name]
    return (VECTOR_SENSITIVITY if tensor.ndim < 2 else 1.0) / (grid.squares[name] / tensor.numel())


def compress(source: Path, out: Path, packer: Packer, skip_objects: bool = False) -> Record:
    """Compress the file or folder of a model, or of a whole training state, into one file. Writes it atomically.

    skip_objects: as for ``any_format.read``.
    Raises CheckpointError if the source cannot be read, OSError if ``out`` cannot be written.
    """
    check_output(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise CheckpointError(f"{out} is the input file; give another name for the output")
    file = any_format.read(source, skip_objects)
    checkpoint = packer.checkpoint(file, 0)
    draft = Header(0, FIRST_SEQUENCE, None, checkpoint.tree, (), checkpoint.record)
    return record_of(write_file(out, draft, checkpoint.tensors, checkpoint.labels, None))


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
        there = {known.step for known in run.chain_lengths()}  # a checkpoint without its parents is packed again
        base: Base | None = None
        chain = 0
        for step, path in sorted(files.items()):
            if step in there:
                yield None
                continue
            file = any_format.read(path, skip_objects)
            checkpoint = packer.checkpoint(replace(file, details={**file.details, "name": path.name}), step)
            if chain == KEYFRAME_EVERY:
                base, chain = None, 0
            written, base = run.commit(checkpoint, base)
            chain += 1
            yield record_of(written)
