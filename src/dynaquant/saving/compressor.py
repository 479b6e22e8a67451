"""Decides how each tensor of a state is stored: weights by search, moments by tolerance, all others exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaquant.engine.forms.external import External
from dynaquant.engine.forms.form import Form, dequantize
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.knobs import Configuration, Knobs
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.methods.method import WeightsToPrepare
from dynaquant.methods.named import METHODS
from dynaquant.options import Quality, check_share
from dynaquant.ranks.group import Group
from dynaquant.saving.assemble import Assembled, assemble
from dynaquant.saving.bounded_tensors import bounded_tensors
from dynaquant.saving.capture import Captured
from dynaquant.saving.compressed import Compressed
from dynaquant.saving.displacements import Displacements
from dynaquant.saving.division import Division, divide
from dynaquant.saving.frozen_and_omitted import (
    FrozenParameters,
    frozen_parameters,
    in_frozen_files,
    note_on_parameters_without_optimizer,
    omitted_tensors,
)
from dynaquant.saving.gradient_statistics import GradientStatistics
from dynaquant.saving.judged_averages import AverageJudge
from dynaquant.saving.memory import Memory
from dynaquant.saving.moment_tolerances import first_tolerances
from dynaquant.saving.notes import notes_on_exact_moments, notes_on_gaps
from dynaquant.saving.presets import PRESETS, budget_of
from dynaquant.saving.rank_zero import on_rank_zero
from dynaquant.saving.replicas import share_writing
from dynaquant.saving.timing import timed
from dynaquant.saving.training_budget import TrainingBudget, learning_rate, scaled_by_rate
from dynaquant.saving.unchanged_weights import Comparison, LastWeight, compare
from dynaquant.search.decision import Decision
from dynaquant.search.evaluation import Evaluate
from dynaquant.search.manager import ConfigurationManager, Limits
from dynaquant.state.roles import untrained
from dynaquant.state.wrappers import named_parameters
from dynaquant.store.sharded_writing import second_of
from dynaquant.training.hash_cache import HashCache
from dynaquant.training.master_weights import master_weights_of
from dynaquant.training.objects import models_of
from dynaquant.training.updates import Updates


class Compressor:
    """Compresses the states of one training, from one checkpoint to the next. All ranks call ``compress`` together.

    objects: the objects of the training, by name. patterns: the user's patterns over names of tensors; a tensor that
    matches one never counts as master weights. keep_lossless_copy: whether to return the exact tensors, too. interval:
    steps to the first save, if known. evaluate_average: metrics of averages, by the names of extras. Raises ValueError
    if the arguments differ between ranks.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        patterns: Collection[str],
        evaluate: Evaluate | None,
        higher_is_better: bool,
        quality: Quality,
        keep_lossless_copy: bool,
        group: Group,
        interval: int | None,
        evaluate_average: Mapping[str, Evaluate],
    ) -> None:
        self._objects, self._patterns, self._quality, self._group = objects, patterns, quality, group
        self._keep_lossless_copy = keep_lossless_copy
        self._model = models_of(objects)
        self._preset = PRESETS[quality.preset]
        self._searches = quality.configuration is None and self._preset is not None
        self.method = METHODS[quality.chosen_method]
        self._largest = self._preset.max_degradation if self._preset else 0.0
        fixed = quality.configuration
        self._manager = ConfigurationManager(self._model, evaluate, higher_is_better, fixed, group)
        judge = partial(AverageJudge, evaluate_average, objects, higher_is_better, group)
        self._averages = group.run_on_all_ranks(judge)
        self._optimizers = [source for source in objects.values() if isinstance(source, torch.optim.Optimizer)]
        if quality.max_degradation is not None:
            self.max_degradation = quality.max_degradation
        self._keeps_to_budget = budget_of(quality) is not None
        arguments = evaluate is None, higher_is_better, quality, sorted(evaluate_average)
        if any(other != arguments for other in group.all_gather(arguments)):
            raise ValueError("evaluate, evaluate_average, higher_is_better and quality must agree on all ranks")
        self.updates = Updates(objects)
        """What the optimizers do between two saves."""
        self.hashes = HashCache()
        """Hashes of tensors that do not train."""
        self._gradients = GradientStatistics(
            self._model, self._optimizers, self.method, self._uses_gradients(fixed), interval
        )

    def _uses_gradients(self, configuration: Knobs | None) -> bool:
        if isinstance(configuration, Configuration):
            return configuration.uses_sensitivity
        return self._preset is not None

    @property
    def max_degradation(self) -> float:
        """The largest relative loss of quality that one checkpoint may cause. The training's budget may allow less."""
        return self._largest

    @max_degradation.setter
    def max_degradation(self, value: float) -> None:
        if not self._searches:
            raise ValueError(
                "max_degradation has no effect here, as this Checkpointer does not search for a configuration: its "
                "quality is 'lossless', or it was given a configuration"
            )
        check_share("max_degradation", value, 0.01)
        self._largest = float(value)
        self._keeps_to_budget = self._quality.training_budget is not None

    def begin(self) -> Memory:
        """Return the memory of a training that begins with the present values."""
        displacements, total = Displacements.from_here(self._model), budget_of(self._quality)
        if total is None:
            return Memory(displacements)
        scaled, expected = scaled_by_rate(self._optimizers), self._quality.expected_restores
        return Memory(displacements, budget=TrainingBudget(float(total), self._largest, expected, scaled))

    @property
    def learning_rate(self) -> float:
        """The mean learning rate of all parameters now."""
        return learning_rate(self._optimizers)

    def compress(
        self,
        captured: Captured,
        memory: Memory,
        size_factor: float,
        step: int,
        interval: int | None,
        corrected: bool,
        exact_weights: bool,
        seconds: dict[str, float],
    ) -> Compressed:
        """Compress the state of a step. Adds the time of each stage to ``seconds``.

        memory: of the last save. size_factor: bytes that deltas took lately, relative to their predicted size.
        interval: steps between two checkpoints, if known. corrected: whether a restore corrects moments of zero.
        exact_weights: whether to return the weights exactly, too; not of a sharded model.

        Changes nothing that the next call depends on. Call ``start_anew`` once it is certain that the result is
        written.
        """
        with timed(seconds, "capture"):
            idle = untrained(self._objects, captured.updated)
            frozen = frozen_parameters(captured, idle, self.hashes)
            external = self._external(captured, frozen)
            tensors = _on_known_devices({n: t for n, t in captured.tensors.items() if n not in external})
            master_of = self._masters(captured, tensors)
            weights = self._weights_to_quantize(tensors, captured.labels, master_of)
            budget = self._budget_at(step, memory)
            # Ranks must come to the same decisions.
            limit = self._group.from_rank_0(self._largest if budget is None else budget.allowed)
            last = self._usable_last_weights(limit, memory)
            run = self._group.run_reducing
            comparison = run(lambda: compare(weights, last, idle, self.hashes, captured.shards))
            bounded = run(lambda: bounded_tensors(tensors, captured, self._preset))
            displaced = run(lambda: memory.displacements.since_the_start(captured.shards)) if self._preset else {}
        with timed(seconds, "search"):
            limits = Limits(limit, self._largest)
            decision, notes = self._decide(memory, limits, size_factor, comparison, captured, bounded, displaced)
            if self._preset is not None:
                error = self._preset.average_error
                bounded, decision = self._averages.judge(decision, bounded, tensors, captured.labels, error, limit)
            notes += notes_on_gaps(captured, self._objects) + self.updates.notes()
            if self._preset is not None:
                notes += note_on_parameters_without_optimizer(self._model, frozen)
                notes += notes_on_exact_moments(captured, self._objects, self._patterns)
        with timed(seconds, "capture"):
            quantized = {} if decision.configuration is None else {**decision.quantized, **comparison.unchanged}
            tolerances = first_tolerances(self._objects, self._preset, interval, corrected) if self._preset else {}
            exactly = {*weights, *master_of.values()} if weights and exact_weights and not captured.division else set()
            copied_exactly = tensors.keys() if self._keep_lossless_copy else exactly
            others = bool(external or master_of or frozen.unchanged or copied_exactly)
            division = captured.division or self._shared(tensors, captured, others)
            assembled = self._assembled(
                captured, division, tensors, {**quantized, **bounded}, tolerances, master_of, external, copied_exactly
            )
            # A master weight is stored instead of its half-precision weight, and gets that weight's label.
            labels = {**captured.labels, **{master: captured.labels[name] for name, master in master_of.items()}}
            assembled, division, labels = captured.differences.add(assembled, division, labels, self._group)
        return Compressed(
            assembled,
            division,
            frozen.unchanged,
            labels,
            decision,
            [*captured.notes, *notes],
            displaced,
            replace(
                memory,
                search=decision.memory,
                budget=budget,
                last_weights=comparison.last_weights(quantized),
                last_limit=limit if not comparison.unchanged else memory.last_limit,
            ),
        )

    def start_anew(self, interval: int | None) -> None:
        """Forget what the live objects have gathered since the last save. interval: steps to the next one, at least."""
        self._gradients.start_anew()
        self.updates.saved()
        self.expect(interval)

    def forget(self) -> None:
        """Forget the recorded gradients, after a restore: training continues from another step."""
        self._gradients.forget()

    def expect(self, interval: int | None) -> None:
        """Announce the number of steps to the next save; None if unknown."""
        self._gradients.expect(interval)

    def mean_squares(self) -> dict[str, float]:
        """Return the mean squared gradients of the model's parameters as far as known, by name in the state.

        The same on all ranks. Collective.
        """
        parameters = {f"model.{name}": parameter for name, parameter in named_parameters(self._model)}
        division = divide(parameters, self._group)
        shards = WHOLE if division is None else division.shards
        measured = self._group.run_reducing(lambda: self._gradients.mean_squares(parameters, shards))
        return self._group.from_rank_0(measured)

    def close(self) -> None:
        """Remove the hooks from the optimizers. May be called again, also after an interrupt."""
        self._gradients.close()
        self.updates.close()

    def _external(self, captured: Captured, frozen: FrozenParameters) -> dict[str, External]:
        """Return the tensors whose values are not written: those in frozen files, and omitted ones."""
        omitted = self._group.run_on_all_ranks(lambda: omitted_tensors(captured, self.hashes))
        return {**in_frozen_files(captured, frozen), **omitted}

    def _weights_to_quantize(
        self, tensors: Mapping[str, Tensor], labels: Mapping[str, Label], master_of: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Return the weights by name, master weights under the names of their half-precision weights."""
        if self._preset is None:
            return {}
        return {name: tensors[master_of.get(name, name)] for name in tensors if labels[name].role == "weight"}

    def _budget_at(self, step: int, memory: Memory) -> TrainingBudget | None:
        """Return the account of the training at a save; None if every checkpoint may use ``max_degradation``."""
        if memory.budget is None or not self._keeps_to_budget:
            return None
        return replace(memory.budget, largest=self._largest).at_save(step, self._optimizers)

    def _usable_last_weights(self, limit: float, memory: Memory) -> Mapping[str, LastWeight]:
        """Return the last checkpoint's weights; none if less is allowed now than for them.

        The training's budget changes the limit at every save. So with a budget, half of it is near enough.
        """
        last = self._largest if memory.last_limit is None else memory.last_limit
        least = last / 2 if memory.budget is not None and self._keeps_to_budget else last
        return {} if limit < least else memory.last_weights

    def _masters(self, captured: Captured, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Map half-precision weights to their master weights. Those of sharded models are stored beside each other."""
        if captured.division is not None:
            return {}
        return master_weights_of(tensors, captured.labels, self._objects, self._patterns)

    def _decide(
        self,
        memory: Memory,
        limits: Limits,
        size_factor: float,
        comparison: Comparison,
        captured: Captured,
        bounded: Mapping[str, Form],
        displaced: Mapping[str, float],
    ) -> tuple[Decision, list[str]]:
        """Return the most compact configuration that is good enough for the changed weights, and notes."""
        if self._preset is None:
            return Decision("lossless", None, memory=memory.search), []
        mean_squares: dict[str, float] = {}
        if self.method.uses_mean_squares or self._manager.judges_by_distortion:
            # Ranks must reach the same decision, so all use the numbers of rank 0.
            measured = self._group.run_reducing(
                lambda: self._gradients.mean_squares(comparison.changed, captured.shards)
            )
            mean_squares = self._group.from_rank_0(measured)
        weights = WeightsToPrepare(
            comparison.changed,
            captured.labels,
            self._preset.step_limits if self._searches else LOOSEST_LIMITS,
            captured.shards,
            mean_squares,
            self._gradients.recorded(),
            self._gradients.needed,
            {name: last.quantized for name, last in memory.last_weights.items()},
            memory.restored_step,
            displaced,
            size_factor,
        )
        prepared, notes = self.method.prepare(weights, self._group)
        stored = {**comparison.unchanged, **bounded}
        decided = {
            name: partial(dequantize, stored[f"model.{name}"])
            for name, _ in named_parameters(self._model)
            if f"model.{name}" in stored
        }
        return self._manager.decide(prepared, decided, memory.search, limits), list(notes)

    def _shared(self, tensors: Mapping[str, Tensor], captured: Captured, has_others: bool) -> Division | None:
        """Return how replicas share the writing; None if rank 0 writes all.

        has_others: whether there are tensors that are not stored by themselves, or will not be: frozen parameters get a
        file of their own. Collective.
        """
        alone = has_others or not self.method.supports_shards
        if self._group.size == 1 or any(self._group.all_gather(alone)):
            return None
        return share_writing(tensors, captured.labels, captured.differences.names, self._group)

    def _assembled(
        self,
        captured: Captured,
        division: Division | None,
        tensors: Mapping[str, Tensor],
        quantized: Mapping[str, Form],
        tolerances: Mapping[str, float],
        master_of: Mapping[str, str],
        external: Mapping[str, External],
        copied_exactly: Collection[str],
    ) -> Assembled:
        """Return what this rank writes: rank 0 everything if there is no division, or each rank its part.

        quantized: all but moments. copied_exactly: as for ``assemble``. Collective.
        """

        def assembled(live: Mapping[str, Tensor], moments: Mapping[str, Form]) -> Assembled:
            forms = {**quantized, **moments}
            return assemble(live, forms, master_of, external, captured.labels, copied_exactly)

        def moments_of(own: Mapping[str, Tensor], shards: Shards) -> dict[str, Form]:
            if self._preset is None or not self.method.quantizes_moments:
                return {}
            first, second = self._preset.first_tolerance, self._preset.second_tolerance
            return quantize_moments(own, captured.labels, first, second, tolerances, shards.held, shards.reduce)

        if division is None:
            return on_rank_zero(lambda: assembled(tensors, moments_of(tensors, WHOLE)), self._group) or Assembled()
        here = {name: tensor for name, tensor in tensors.items() if division.writes(name)}
        if division.shards.divided:
            own, shards = division.without_copies(tensors)
            moments = self._group.run_reducing(lambda: moments_of(own, shards))
            found = self._group.run_on_all_ranks(lambda: assembled(here, moments))
        else:
            moments = self._group.run_on_all_ranks(lambda: moments_of(here, WHOLE))
            found = self._group.run_on_all_ranks(lambda: assembled(here, moments))
        return replace(found, seconds={name: second_of(stored) for name, stored in moments.items()})


def _on_known_devices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors; those of devices other than CPU and CUDA as copies in host memory."""
    return {name: t if t.device.type in ("cpu", "cuda") else t.cpu() for name, t in tensors.items()}
