"""Decides how each tensor of a source is stored: weights by search, moments by tolerance, all others exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, partial

from torch import Tensor

from dynaquant.engine.forms.bounded import BoundedTensor
from dynaquant.engine.forms.form import Form, dequantize
from dynaquant.engine.quantize.bounds import average_bounds, quantize_bounded
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.methods.method import WeightsToPrepare
from dynaquant.methods.named import METHODS
from dynaquant.options import Quality, check_share
from dynaquant.ranks.group import Group
from dynaquant.saving import gradient_alignment, gradient_energy
from dynaquant.saving.assemble import Assembled, Compressed, assemble, assemble_on_access
from dynaquant.saving.judged_averages import AverageJudge
from dynaquant.saving.memory import Memory
from dynaquant.saving.moment_tolerances import MomentTolerances
from dynaquant.saving.presets import PRESETS, Preset, budget_of, largest_degradation
from dynaquant.saving.record import timed
from dynaquant.saving.source import Source
from dynaquant.saving.training_budget import TrainingBudget
from dynaquant.saving.unchanged_weights import ComparedWeights, compare_weights
from dynaquant.search.decision import Decision
from dynaquant.search.manager import ConfigurationManager, Limits
from dynaquant.search.metric import UserMetric
from dynaquant.store.writing import depends_on
from dynaquant.training.objects import MAIN


class Compressor:
    """Compresses sources, one checkpoint after another. All ranks call ``compress`` together.

    metric: of the user; None if the distortion of the weights decides. averages: judges averages of weights; None if
    they have no metrics. Raises ValueError if the arguments differ between ranks.
    """

    def __init__(
        self,
        quality: Quality,
        metric: UserMetric | None,
        group: Group,
        averages: AverageJudge | None = None,
    ) -> None:
        self._quality, self._group, self._averages = quality, group, averages
        self.method = METHODS[quality.chosen_method]
        """How weights are quantized."""
        self.preset = PRESETS[quality.preset]
        """How much quality may be lost; None if every tensor is stored exactly."""
        self._searches = quality.configuration is None and self.preset is not None
        self._largest = largest_degradation(quality)
        self._keeps_to_budget = budget_of(quality) is not None
        self._manager = ConfigurationManager(metric, quality.configuration, group)
        judged = metric and metric.higher_is_better, averages and (averages.names, averages.higher_is_better)
        arguments = quality, judged
        if any(other != arguments for other in group.all_gather(arguments)):
            raise ValueError("evaluate, evaluate_average, higher_is_better and quality must agree on all ranks")

    @property
    def uses_gradients(self) -> bool:
        """Whether a search, or the given configuration, needs what is known of the gradients."""
        configuration = self._quality.configuration
        if isinstance(configuration, Configuration):
            return configuration.uses_sensitivity
        return self.preset is not None

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

    def compress(self, source: Source, memory: Memory, size_factor: float, seconds: dict[str, float]) -> Compressed:
        """Compress a source. Adds the time of each stage to ``seconds``.

        memory: of the last save. size_factor: bytes that deltas took lately, relative to their predicted size. Changes
        nothing that the next call depends on.
        """
        with timed(seconds, "capture"):
            names = {} if self.preset is None else source.weight_names
            weights: Mapping[str, Tensor] = LazyMapping(names, lambda name: source.tensors[names[name]])
            if not source.on_access:  # looked up often
                weights = dict(weights)
            budget, run = self._budget_at(source, memory), self._group.run_reducing
            energy = run(lambda: source.energy(weights))
            allowed = self._largest if budget is None else budget.allowed
            # Ranks must come to the same decisions.
            allowed, largest, trust = self._group.from_rank_0(
                (allowed, self._largest, energy.trust(memory.strongest_gradients))
            )

            @cache
            def alignment() -> float:  # only where the estimate decides: it reads all weights and moments
                return self._group.from_rank_0(run(lambda: source.alignment(weights)))

            limits = Limits(allowed, largest, lambda: trust * alignment())
            limit = limits.of_estimate().allowed if self._manager.judges_by_distortion else allowed
            # Weights of a looser limit are not kept. A budget changes it at every save, so half of it is near enough.
            last_limit = self._largest if memory.last_limit is None else memory.last_limit
            usable = limit >= (last_limit if budget is None else last_limit / 2)
            last = memory.last_weights if usable else {}
            compared = run(lambda: compare_weights(weights, last, source.untrained, source.hash_of, source.shards))
            bounded = run(lambda: _bounded(source, self.preset))
        with timed(seconds, "search"):
            decision, notes = self._decide(source, memory, limits, size_factor, compared, bounded)
            if decision.judged_by not in (None, "evaluate"):
                if trust < 1:
                    notes.append(gradient_energy.NOTE)
                if alignment() < 1:
                    notes.append(gradient_alignment.NOTE)
            if self._averages is not None and self.preset is not None:
                error = self.preset.average_error
                bounded, decision = self._averages.judge(decision, bounded, source.tensors, source.labels, error, limit)
        with timed(seconds, "capture"):
            quantized: Mapping[str, Form] = {}
            if decision.configuration is not None:
                quantized = _together(compared.unchanged, decision.quantized)
            tolerances = self._tolerances(source, decision, are_weak=trust < 1)
            assembled = self._assembled(source, _together(bounded, quantized), tolerances)
        # A master weight is stored instead of its half-precision weight, and gets that weight's label.
        labels = {**source.labels, **{master: source.labels[name] for name, master in source.master_of.items()}}
        remembered = replace(
            memory,
            search=decision.memory,
            budget=budget,
            last_weights={},
            last_limit=memory.last_limit if compared.unchanged else limit,
            strongest_gradients=energy.strongest(memory.strongest_gradients),
        )
        found = Compressed(assembled, source.division, labels, decision, [*source.notes, *notes], remembered, compared)
        return found if source.on_access else found.with_last_weights(quantized)

    def _budget_at(self, source: Source, memory: Memory) -> TrainingBudget | None:
        """Return the account of the training at a save; None if every checkpoint may use ``max_degradation``."""
        if memory.budget is None or not self._keeps_to_budget:
            return None
        budget = replace(memory.budget, largest=self._largest)
        return budget if source.position is None else budget.at(source.position())

    def _decide(
        self,
        source: Source,
        memory: Memory,
        limits: Limits,
        size_factor: float,
        compared: ComparedWeights,
        bounded: Mapping[str, Form],
    ) -> tuple[Decision, list[str]]:
        """Return the most compact configuration that is good enough for the changed weights, and notes."""
        if self.preset is None:
            return Decision("lossless", None, memory=memory.search), []
        mean_squares: Mapping[str, float] = {}
        if self.method.uses_mean_squares or self._manager.judges_by_distortion:
            # Ranks must reach the same decision, so all use the numbers of rank 0.
            measured = self._group.run_reducing(lambda: source.mean_squares(compared.changed))
            mean_squares = self._group.from_rank_0(measured)
        weights = WeightsToPrepare(
            compared.changed,
            source.labels,
            self.preset.step_limits if self._searches else LOOSEST_LIMITS,
            source.shards,
            mean_squares,
            source.gradients,
            source.records_gradients,
            {name: last.quantized for name, last in memory.last_weights.items()},
            memory.restored_step,
            source.displaced,
            size_factor,
            source.on_access,
            source.vectors_count_more,
        )
        prepared, notes = self.method.prepare(weights, self._group)
        decided = {name: partial(dequantize, form) for name, form in {**compared.unchanged, **bounded}.items()}
        return self._manager.decide(prepared, decided, memory.search, limits), list(notes)

    def _tolerances(self, source: Source, decision: Decision, are_weak: bool) -> MomentTolerances | None:
        """Return how coarse moments may be. None: they are stored exactly. are_weak: whether gradients are, by now."""
        if self.preset is None or not self.method.quantizes_moments:
            return None
        found = MomentTolerances(self.preset.first_tolerance, self.preset.second_tolerance, source.first_tolerances)
        return found.beside_exact_weights() if decision.configuration is None or are_weak else found

    def _assembled(
        self, source: Source, quantized: Mapping[str, Form], tolerances: MomentTolerances | None
    ) -> Assembled:
        """Return what this rank writes: rank 0 everything, or of a divided state each rank its part. Collective."""

        def assembled(live: Mapping[str, Tensor], moments: Mapping[str, Form]) -> Assembled:
            forms = _together(quantized, moments)
            if source.on_access:
                return assemble_on_access(live, forms, source.labels, source.copied_exactly)
            return assemble(live, forms, source.master_of, source.external, source.labels, source.copied_exactly)

        def moments_of(own: Mapping[str, Tensor], shards: Shards) -> dict[str, Form]:
            if tolerances is None:
                return {}
            first, second, firsts = tolerances.first, tolerances.second, tolerances.firsts
            return quantize_moments(own, source.labels, first, second, firsts, shards, source.epsilons)

        tensors, division = source.tensors, source.division
        if division is None:
            return self._group.on_rank_0(lambda: assembled(tensors, moments_of(tensors, WHOLE))) or Assembled()
        here = {name: tensor for name, tensor in tensors.items() if division.writes(name)}
        own, shards = division.without_copies(tensors)
        moments = self._group.run_reducing(lambda: moments_of(own, shards))
        found = self._group.run_on_all_ranks(lambda: assembled(here, moments))
        return replace(found, depends_on={name: depends_on(stored) for name, stored in moments.items()})


def _bounded(source: Source, preset: Preset | None) -> dict[str, BoundedTensor]:
    """Return the tensors of role ``bound`` and averages of weights, quantized, by name. Collective."""
    tensors, labels, shards = source.tensors, source.labels, source.shards

    def quantized(names: Collection[str], shards: Shards) -> dict[str, BoundedTensor]:
        bounds = {name: bound for name in names if (bound := labels[name].bound) is not None}
        if preset is not None:
            averages = {name: tensors[name] for name in names if labels[name].role == "average"}
            bounds |= average_bounds(averages, preset.average_error, shards)
        return quantize_bounded(tensors, bounds, shards)

    def is_alone(name: str) -> bool:  # an extra that is not divided, and so may differ between ranks
        return name.partition(".")[0] not in MAIN and name not in shards.held

    together, alone = [n for n in tensors if not is_alone(n)], [n for n in tensors if is_alone(n)]
    return {**quantized(together, shards), **quantized(alone, WHOLE)}


def _together(*forms: Mapping[str, Form]) -> Mapping[str, Form]:
    """Return forms by name as one mapping, which looks them up only on access. No name is in two of them."""
    source = {name: each for each in forms for name in each}
    return LazyMapping(source, lambda name: source[name][name])
