"""Decides how each tensor of a state is stored: weights by search, moments by tolerance, all others exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaquant.engine.coding.encoder import Coder
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.grid_weights import GridWeights
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights
from dynaquant.engine.quantize.knobs import Configuration, Knobs
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.dequantize import dequantize
from dynaquant.engine.tensors.stored import External, Quantized, StoredTensor
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
from dynaquant.saving.moment_tolerances import first_tolerances
from dynaquant.saving.notes import notes_on_exact_moments, notes_on_gaps
from dynaquant.saving.prepare import prepared_for_clusters, prepared_for_grid
from dynaquant.saving.presets import PRESETS, budget_of
from dynaquant.saving.rank_zero import on_rank_zero
from dynaquant.saving.record import degradation_of, limit_of
from dynaquant.saving.replicas import share_writing
from dynaquant.saving.timing import timed
from dynaquant.saving.training_budget import TrainingBudget, learning_rate, scaled_by_rate
from dynaquant.saving.unchanged_weights import Comparison, LastWeight, compare, restored_weights
from dynaquant.search.decision import Decision
from dynaquant.search.evaluation import Evaluate
from dynaquant.search.manager import ConfigurationManager
from dynaquant.state.roles import untrained
from dynaquant.state.wrappers import named_parameters
from dynaquant.store.container import Header
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
        self._objects, self._patterns, self._group = objects, patterns, group
        self._keep_lossless_copy = keep_lossless_copy
        self._model = models_of(objects)
        self._preset = PRESETS[quality.preset]
        self._searches = quality.configuration is None and self._preset is not None
        self.method = quality.chosen_method
        self.vectors = self.method == "grid"
        """Whether parameters of one dimension are quantized, too. Their share is large once all others are small."""
        self._largest = self._preset.max_degradation if self._preset else 0.0
        fixed = quality.configuration
        self.manager = ConfigurationManager(self._model, evaluate, higher_is_better, self._largest, fixed, group)
        judge = partial(AverageJudge, evaluate_average, objects, higher_is_better, group)
        self._averages = group.run_on_all_ranks(judge)
        self._optimizers = [source for source in objects.values() if isinstance(source, torch.optim.Optimizer)]
        self._budget: TrainingBudget | None = None
        if quality.max_degradation is not None:
            self.max_degradation = quality.max_degradation
        if (total := budget_of(quality)) is not None:
            scaled = scaled_by_rate(self._optimizers)
            self._budget = TrainingBudget(float(total), self.max_degradation, quality.expected_restores, scaled)
        self._budget_is_explicit = quality.training_budget is not None
        arguments = evaluate is None, higher_is_better, quality, sorted(evaluate_average)
        if any(other != arguments for other in group.all_gather(arguments)):
            raise ValueError("evaluate, evaluate_average, higher_is_better and quality must agree on all ranks")
        self.updates = Updates(objects)
        """What the optimizers do between two saves."""
        self.hashes = HashCache()
        """Hashes of tensors that do not train."""
        self._displacements = Displacements(self._model)
        self._last_weights: Mapping[str, LastWeight] = {}
        self._last_limit = self.max_degradation
        self._restored_step = 0
        self._gradients = GradientStatistics(
            self._model, self._optimizers, self.method, self.vectors, self._uses_gradients(fixed), interval
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
        if self._budget is not None:
            self._budget = replace(self._budget, largest=self._largest) if self._budget_is_explicit else None

    @property
    def coder(self) -> Coder:
        """How levels of weights are coded."""
        return "rearranged" if self.method == "published" else "conditional"

    def compress(
        self,
        captured: Captured,
        step: int,
        interval: int | None,
        corrected: bool,
        exact_weights: bool,
        seconds: dict[str, float],
    ) -> Compressed:
        """Compress the state of a step. Adds the time of each stage to ``seconds``.

        interval: steps between two checkpoints, if known. corrected: whether a restore corrects moments of zero.
        exact_weights: whether to return the weights exactly, too; not of a sharded model.

        Changes nothing that the next call depends on. Call ``saved`` once it is certain that the result is written.
        """
        with timed(seconds, "capture"):
            idle = untrained(self._objects, captured.updated)
            frozen = frozen_parameters(captured, idle, self.hashes)
            external = self._external(captured, frozen)
            tensors = _on_known_devices({n: t for n, t in captured.tensors.items() if n not in external})
            master_of = self._masters(captured, tensors)
            weights = self._weights_to_quantize(tensors, captured.labels, master_of)
            budget = self._budget and self._budget.at_save(step, self._optimizers)
            # Ranks must come to the same decisions.
            limit = self._group.from_rank_0(self._largest if budget is None else budget.allowed)
            last = self._usable_last_weights(limit)
            run = self._group.run_reducing
            comparison = run(lambda: compare(weights, last, idle, self.hashes, captured.shards))
            bounded = run(lambda: bounded_tensors(tensors, captured, self._preset))
            displaced = run(lambda: self._displacements.since_the_start(captured.shards)) if self._preset else {}
        with timed(seconds, "search"):
            self.manager.max_degradation, self.manager.last_resort = limit, self._largest
            decision, notes = self._decide(comparison, captured, bounded, displaced)
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
            comparison.last_weights(quantized),
            limit if not comparison.unchanged else self._last_limit,
            budget,
            displaced,
        )

    def saved(self, compressed: Compressed, interval: int | None) -> None:
        """Continue from the state that was compressed last. Call this once it is certain to be written.

        interval: steps to the next save, at least.
        """
        self.manager.saved(compressed.decision)
        self._last_weights = compressed.last_weights
        self._last_limit = compressed.limit
        if self._budget is not None:
            self._budget = compressed.budget
        self._gradients.start_anew()
        self.updates.saved()
        self.expect(interval)

    def resume(self, header: Header, tensors: Mapping[str, StoredTensor], from_lossless_copy: bool) -> None:
        """Continue from a restored checkpoint.

        tensors: the stored forms of the tensors that models and optimizers got. from_lossless_copy: whether they got
        the values of the lossless copy instead.
        """
        self._last_weights = restored_weights(header, tensors)
        self._last_limit = limit_of(header.record) or self._largest
        self._restored_step = header.step
        if self._budget is not None:
            account = header.record.get("training_budget")
            self._budget = self._budget.continued(account, header.step, learning_rate(self._optimizers))
            if self._last_weights and not from_lossless_copy:
                self._budget = self._budget.restored(degradation_of(header.record))
        weights = {} if from_lossless_copy else {name: last.quantized for name, last in self._last_weights.items()}
        self.manager.resume(header.record, weights)
        self._displacements.resume(header.record.get("displaced"))
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

    def _usable_last_weights(self, limit: float) -> Mapping[str, LastWeight]:
        """Return the last checkpoint's weights; none if less is allowed now than for them.

        The training's budget changes the limit at every save. So with a budget, half of it is near enough.
        """
        least = self._last_limit if self._budget is None else self._last_limit / 2
        return {} if limit < least else self._last_weights

    def _masters(self, captured: Captured, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Map half-precision weights to their master weights. Those of sharded models are stored beside each other."""
        if captured.division is not None:
            return {}
        return master_weights_of(tensors, captured.labels, self._objects, self._patterns)

    def _decide(
        self,
        comparison: Comparison,
        captured: Captured,
        bounded: Mapping[str, Quantized],
        displaced: Mapping[str, float],
    ) -> tuple[Decision, list[str]]:
        """Return the most compact configuration that is good enough for the changed weights, and notes."""
        if self._preset is None:
            return Decision("lossless", None), []
        labels, shards = captured.labels, captured.shards
        mean_squares: dict[str, float] = {}
        if self.method == "grid" or self.manager.judges_by_distortion:
            # Ranks must reach the same decision, so all use the numbers of rank 0.
            measured = self._group.run_reducing(lambda: self._gradients.mean_squares(comparison.changed, shards))
            mean_squares = self._group.from_rank_0(measured)
        weights: GridWeights | KMeansWeights
        if self.method == "grid":
            weights = prepared_for_grid(
                comparison.changed,
                self._last_weights,
                mean_squares,
                self._restored_step,
                self._preset.step_limits if self._searches else LOOSEST_LIMITS,
                displaced,
                self._group,
                shards,
            )
            notes = list(weights.notes)
        else:
            gradients = self._gradients.recorded()
            weights = prepared_for_clusters(comparison.changed, labels, gradients, self._group)
            notes = list(weights.notes)
            if self._gradients.needed and weights.weights and not gradients:
                notes.append(
                    "no gradients were recorded before this save: weight magnitudes were used in place of sensitivity"
                )
        stored = {**comparison.unchanged, **bounded}
        decided = {
            name: partial(dequantize, stored[f"model.{name}"])
            for name, _ in named_parameters(self._model)
            if f"model.{name}" in stored
        }
        return self.manager.decide(weights, decided, mean_squares), notes

    def _shared(self, tensors: Mapping[str, Tensor], captured: Captured, has_others: bool) -> Division | None:
        """Return how replicas share the writing; None if rank 0 writes all.

        has_others: whether there are tensors that are not stored by themselves, or will not be: frozen parameters get a
        file of their own. Collective.
        """
        alone = has_others or self.method != "grid"
        if self._group.size == 1 or any(self._group.all_gather(alone)):
            return None
        return share_writing(tensors, captured.labels, captured.differences.names, self._group)

    def _assembled(
        self,
        captured: Captured,
        division: Division | None,
        tensors: Mapping[str, Tensor],
        quantized: Mapping[str, Quantized],
        tolerances: Mapping[str, float],
        master_of: Mapping[str, str],
        external: Mapping[str, External],
        copied_exactly: Collection[str],
    ) -> Assembled:
        """Return what this rank writes: rank 0 everything if there is no division, or each rank its part.

        quantized: all but moments. copied_exactly: as for ``assemble``. Collective.
        """

        def assembled(live: Mapping[str, Tensor], moments: Mapping[str, Quantized]) -> Assembled:
            forms = {**quantized, **moments}
            return assemble(live, forms, master_of, external, captured.labels, copied_exactly)

        def moments_of(own: Mapping[str, Tensor], shards: Shards) -> dict[str, Quantized]:
            if self._preset is None or self.method != "grid":
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
