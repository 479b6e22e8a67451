"""The state of a live training as a ``Source``: what its objects tell of the tensors, from one save to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.methods.method import Method
from dynaquant.ranks.dtensors import memory_of
from dynaquant.ranks.group import Group
from dynaquant.saving.capture import Captured, frozen_parameters, in_frozen_files, omitted_tensors
from dynaquant.saving.displacements import Displacements
from dynaquant.saving.division import divide
from dynaquant.saving.gradient_alignment import gradient_alignment
from dynaquant.saving.gradient_energy import GradientEnergy, gradient_energy
from dynaquant.saving.moment_tolerances import bounded_by_weights, by_unused_rows, tolerances_of, weights_of
from dynaquant.saving.notes import notes_on_exact_tensors, notes_on_gaps
from dynaquant.saving.presets import Preset
from dynaquant.saving.source import Source
from dynaquant.saving.training_budget import TrainingPosition, learning_rate
from dynaquant.search.distortion import mean_squared_gradients
from dynaquant.state.roles import quantizable
from dynaquant.training.first_moments import windows_of
from dynaquant.training.gradients import GradientRecorder
from dynaquant.training.hash_cache import HashCache
from dynaquant.training.master_weights import master_weights_of
from dynaquant.training.objects import models_of, optimizers_of, parameters_of
from dynaquant.training.optimizers import epsilons_of
from dynaquant.training.updates import Updates

WINDOW = 50
"""Optimizer steps before a checkpoint whose gradients are recorded (method 1.1)."""


class TrainingSource:
    """What the objects of one training tell of its state, at every save. All ranks call the methods together.

    objects: of the training, by name. patterns: the user's patterns over names of tensors; a tensor that matches one
    never counts as master weights. preset: None if every tensor is stored exactly. records_gradients: whether the
    method needs them. keeps_lossless_copy: whether checkpoints have one. interval: steps to the first save, if known.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        patterns: Collection[str],
        preset: Preset | None,
        method: Method,
        records_gradients: bool,
        keeps_lossless_copy: bool,
        group: Group,
        interval: int | None,
    ) -> None:
        self._objects, self._patterns, self._preset, self._method = objects, patterns, preset, method
        self._keeps_lossless_copy, self._group = keeps_lossless_copy, group
        self._model = models_of(objects)
        self._optimizers = list(optimizers_of(objects).values())
        self.updates = Updates(objects)
        """What the optimizers do between two saves."""
        self.hashes = HashCache()
        """Hashes of tensors that do not train."""
        quantized = {n: p for n, p in parameters_of(self._model).items() if quantizable(p, method.quantizes_vectors)}
        self._recorders = [
            GradientRecorder(quantized, optimizer, WINDOW, interval, method.accumulate)
            for optimizer in (self._optimizers if records_gradients else ())
        ]

    @property
    def learning_rate(self) -> float:
        """The mean learning rate of all parameters now."""
        return learning_rate(self._optimizers)

    def displacements(self) -> Displacements:
        """Return the displacements of a training that begins with the values at the next step of an optimizer."""
        found = Displacements.from_here(self._model)
        self.updates.before_next_step(found.begin_here)
        return found

    def source(
        self,
        captured: Captured,
        displacements: Displacements,
        *,
        step: int,
        interval: int | None,
        corrected: bool,
        exact_weights: bool,
    ) -> Source:
        """Return a captured state as a source, with notes for the record. Collective.

        displacements: of the training. interval: steps between two checkpoints, if known. corrected: whether a restore
        corrects moments of zero. exact_weights: whether to keep the weights exactly, too; not of a sharded model.
        """
        frozen = frozen_parameters(captured, self.hashes)
        omitted = self._group.run_on_all_ranks(lambda: omitted_tensors(captured, self.hashes))
        external = {**in_frozen_files(captured, frozen), **omitted}
        own = {name: tensor for name, tensor in captured.tensors.items() if name not in external}
        tensors = {name: captured.small_on_host[name] for name in own}
        tensors = {n: t if t.is_cpu or kernels.fills(t.device) else t.cpu() for n, t in tensors.items()}
        # Master weights of sharded models are stored beside their half-precision weights.
        sharded, master_of = captured.division is not None, {}
        if not sharded:
            master_of = master_weights_of(own, tensors, captured.labels, self._objects, self._patterns)
        copied: Collection[str] = ()
        if self._keeps_lossless_copy:
            copied = tensors.keys()
        elif exact_weights and not sharded and self._preset is not None:
            weights = {name for name in tensors if captured.labels[name].role == "weight"}
            copied = {*weights, *master_of.values()} if weights else ()
        notes = [*captured.notes, *notes_on_gaps(captured, self._objects), *self.updates.notes()]
        displaced: Mapping[str, float] = {}
        tolerances: Mapping[str, float] = {}
        if self._preset is not None:
            displaced = self._group.run_reducing(lambda: displacements.since_the_start(captured.shards))
            windows = windows_of(self._objects, captured.parameters, corrected)
            windows = by_unused_rows(windows, own, captured.shards)
            tolerances, limits = tolerances_of(windows, self._preset, interval), self._preset.step_limits
            tolerances = bounded_by_weights(tolerances, windows, weights_of(windows), own, limits, captured.shards)
            notes += notes_on_exact_tensors(captured, self._objects, self._patterns, frozen, master_of.values())

        @cache
        def trained() -> dict[str, Tensor]:  # once, as it takes long for many tensors
            names = [name for name in captured.labels if captured.labels[name].role == "weight"]
            stored = {name: master_of.get(name, name) for name in names}
            return self._trained({name: own[each] for name, each in stored.items() if each in own})

        def some(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: trained()[name] for name in weights if name in trained()}

        return Source(
            tensors=tensors,
            labels=captured.labels,
            position=lambda: TrainingPosition.of(step, self._optimizers),
            master_of=master_of,
            mean_squares=lambda weights: self._mean_squares(some(weights), captured.shards),
            energy=lambda weights: self._energy(some(weights), captured.shards),
            alignment=lambda weights: gradient_alignment(some(weights), self._optimizers, captured.shards),
            gradients=self._recorded(),
            records_gradients=bool(self._recorders),
            displaced=displaced,
            untrained=captured.untrained,
            hash_of=lambda name: self.hashes.of(name, own[name]),
            external=external,
            frozen=frozen.unchanged,
            first_tolerances=tolerances,
            epsilons={} if self._preset is None else epsilons_of(self._objects, captured.parameters),
            copied_exactly=copied,
            division=captured.division,
            notes=notes,
        )

    def start_anew(self, interval: int | None) -> None:
        """Forget what the live objects have gathered since the last save. interval: steps to the next one, at least."""
        for recorder in self._recorders:
            recorder.collect()
        self.updates.saved()
        self.expect(interval)

    def forget(self) -> None:
        """Forget what was recorded, after a restore: training continues from another step."""
        self.updates.forget()
        for recorder in self._recorders:
            recorder.forget()

    def expect(self, interval: int | None) -> None:
        """Announce the number of steps to the next save; None if unknown."""
        for recorder in self._recorders:
            recorder.expect(interval)

    def mean_squares(self) -> dict[str, float]:
        """Return the mean squared gradients of the model's parameters as far as known, by name in the state.

        The same on all ranks. Collective.
        """
        parameters = parameters_of(self._model)
        division = divide(parameters, self._group)
        shards = WHOLE if division is None else division.shards
        trained = self._trained(parameters)
        measured = self._group.run_reducing(lambda: self._mean_squares(trained, shards))
        return self._group.from_rank_0(measured)

    def close(self) -> None:
        """Remove the hooks from the optimizers. May be called again, also after an interrupt."""
        for recorder in self._recorders:
            recorder.close()
        self.updates.close()

    def _recorded(self) -> dict[str, Tensor]:
        return {name: statistic for recorder in self._recorders for name, statistic in recorder.recorded.items()}

    def _trained(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that optimizers train in the place of the model's weights: these or master weights."""
        trained = {memory_of(p): p for o in self._optimizers for group in o.param_groups for p in group["params"]}
        own = parameters_of(self._model)
        return {name: trained.get(memory_of(t), own[name]) for name, t in weights.items() if name in own}

    def _mean_squares(self, trained: Mapping[str, Tensor], shards: Shards) -> dict[str, float]:
        """Return F of each weight, from the optimizer or as recorded. trained: as ``_trained`` returns them."""
        return mean_squared_gradients(trained, self._optimizers, self._recorded_squares(), shards)

    def _energy(self, trained: Mapping[str, Tensor], shards: Shards) -> GradientEnergy:
        steps = max([recorder.recorded_steps for recorder in self._recorders], default=0)
        divisor = max(steps, 1) if self._method.adds_up_steps else 1
        recorded = {name: square / divisor for name, square in self._recorded_squares().items()}
        return gradient_energy(trained, self._optimizers, recorded, shards)

    def _recorded_squares(self) -> dict[str, float]:
        statistics = kernels.small_on_host(self._recorded())
        return {name: self._method.mean_square(statistic) for name, statistic in statistics.items()}
