"""The method ``"grid"``: uniform grids, whose steps follow the sensitivity of the loss (method 2.1).

It searches for the scale exponent of the grids, and records the sum of each tensor's mean squared gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dynaquant.engine.quantize.grid_weights import GridWeights, grid_weights
from dynaquant.engine.quantize.knobs import MAX_SCALE, SCALES_PER_OCTAVE, GridConfiguration, Knobs, in_short
from dynaquant.engine.tensors.codebook import Grid
from dynaquant.methods.grid.scale_search import LONGEST_MOVE, degradation_at_scale_1, first_exponent, scale_search
from dynaquant.methods.method import Method, WeightsToPrepare
from dynaquant.ranks.group import Group
from dynaquant.search.decision import NOTHING_GOOD_ENOUGH, Found, Search
from dynaquant.search.displacement import keeps_enough
from dynaquant.search.judge import DISTORTION_SCALE, DistortionJudge, JudgedBy
from dynaquant.search.search_memory import REMEMBERED, History, LastScale, SearchMemory
from dynaquant.search.trials import Trials
from dynaquant.training.gradients import sums_of_squares

BEYOND_ESTIMATE = SCALES_PER_OCTAVE // 2
"""A grid may be so much coarser than the estimate says if a metric in coarse steps does not forbid it. The estimate
errs on the safe side."""
MOST_DISTORTION = 0.1
"""The coarsest grid loses this share of the weights' squares, weighted by the loss's sensitivity. Coarser ones are not
tried, whatever the metric says: early in a training it may prefer a model with no weights at all."""
LEAST_DISTORTION = 1e-9
"""The finest grid loses this share: about what 16-bit floats lose."""


@dataclass(frozen=True)
class PreparedForGrid:
    """The weights of a checkpoint, ready for every scale. measured: whether any mean squared gradient is known."""

    quantizer: GridWeights
    measured: bool
    last_resort: ClassVar[Search] = "scale"

    @property
    def estimate(self) -> DistortionJudge:
        """The judge that stands in for a metric."""
        grid = self.quantizer
        judged_by: JudgedBy = "fisher distortion" if self.measured and grid.mean_squares else "distortion"
        return DistortionJudge(grid.weights, grid.mean_squares, judged_by, grid.shards)

    def bound(self, estimated: Knobs | None) -> Knobs:
        """Return the coarsest grid that a metric in coarse steps may choose. estimated: good enough by the estimate."""
        if not isinstance(estimated, GridConfiguration):
            return GridConfiguration(-MAX_SCALE)
        return GridConfiguration(min(estimated.scale + BEYOND_ESTIMATE, MAX_SCALE))

    def find(self, trials: Trials, memory: SearchMemory) -> Found:
        """Return the coarsest grid that is good enough. Collective."""
        return search_grid(self.quantizer, trials, memory.history.scale, memory.gave_up)

    def last(self, memory: SearchMemory, limit: float) -> tuple[Search, Knobs]:  # noqa: ARG002
        """Return the last scale."""
        scale = memory.history.scale
        return "scale", GridConfiguration(0 if scale is None else scale.exponent)

    def after(self, memory: SearchMemory, limit: float, found: Knobs, trials: Trials) -> SearchMemory:
        """Return what the next search starts from.

        Weights that are far enough from the restored ones, as rounding to the nearest level keeps them, need no
        protection any more.
        """
        assert isinstance(found, GridConfiguration)
        degradations = {
            trial.configuration.scale: trial.degradation
            for trial in trials.done
            if isinstance(trial.configuration, GridConfiguration) and trial.degradation is not None
        }
        kept = trials.trial(found).progress
        left = kept is not None and keeps_enough(kept) and not found.dithered
        history = history_after(memory.history, limit, found, degradations)
        return replace(memory, history=history, restored={} if left else memory.restored)


def _prepare(weights: WeightsToPrepare, group: Group) -> tuple[PreparedForGrid, Sequence[str]]:
    """Return the weights prepared for grids. Where possible a tensor keeps its grid step. Collective."""
    grids = {name: last.codebook for name, last in weights.last.items()}
    rungs = {name: grid.rung for name, grid in grids.items() if isinstance(grid, Grid)}

    def prepared() -> GridWeights:
        return grid_weights(
            weights.tensors,
            weights.mean_squares,
            rungs,
            weights.restored_step,
            weights.shards,
            weights.step_limits,
            weights.displaced,
            weights.on_access,
            weights.vectors_count_more,
        )

    measured = bool(weights.mean_squares)
    if weights.shards.divided:  # all ranks have the same numbers
        found = group.run_reducing(prepared)
    else:
        found = group.run_on_all_ranks(prepared)
        # Ranks must decide alike, so all use the numbers of rank 0.
        mean_squares, squares, steps = group.from_rank_0((found.mean_squares, found.squares, found.largest_steps))
        found = replace(found, mean_squares=mean_squares, squares=squares, largest_steps=steps)
    return PreparedForGrid(found, measured), found.notes


def search_grid(weights: GridWeights, trials: Trials, last: LastScale | None, gave_up: bool) -> Found:
    """Find the coarsest grid that is good enough and keeps enough of the displacement since a restore. Collective.

    last: the scale exponent that was found before (``History.scale``).
    gave_up: whether the last search found nothing good enough.

    If rounding to the nearest level keeps too little displacement, the search uses stochastic rounding. That is known
    before anything is evaluated, unless it is true only for the scale that is found. If stochastic rounding finds
    nothing, chooses the configuration that keeps most, of those that were tried and are good enough.
    """
    limit = trials.limit
    finest = weights.scale_exponent_for(LEAST_DISTORTION)
    coarsest = max(min(weights.scale_exponent_for(MOST_DISTORTION), weights.coarsest_scale), finest)
    if isinstance(trials.coarsest, GridConfiguration):
        coarsest = min(max(trials.coarsest.scale, finest), coarsest)
    # If the last search found nothing, score the finest grid. Search again only if it is good enough.
    if gave_up and not trials.is_good_enough(GridConfiguration(finest)):
        return NOTHING_GOOD_ENOUGH

    def search(start: int, earlier: Sequence[float] | None, dithered: bool) -> int | None:
        def score(exponents: Sequence[int], low: float) -> list[float]:
            return trials.score([GridConfiguration(exponent, dithered) for exponent in exponents], low=low)

        return scale_search(start, finest, coarsest, score, limit, earlier, trials.per_round)

    earlier: Sequence[float] | None = None
    if trials.coarsest is not None:
        start = coarsest
    elif last is not None:
        start, earlier = first_exponent(last.exponent, last.at_scale_1, limit), last.at_scale_1
    else:
        start = weights.scale_exponent_for(limit / DISTORTION_SCALE) if limit > 0 else finest
    rounded = GridConfiguration(min(max(start, finest), coarsest))
    if trials.keeps_enough(rounded):
        found = search(start, earlier, False)
        if found is None:
            return NOTHING_GOOD_ENOUGH
        rounded = GridConfiguration(found)
        if trials.keeps_enough(rounded):
            return Found("scale", rounded, rounded)
        start, earlier = found, earlier or ()

    # Stochastic rounding keeps the displacement on average. The metric judges its noise.
    found = search(start, earlier, True)
    if found is not None:
        chosen = GridConfiguration(found, dithered=True)
        note = (
            f"stochastic rounding: rounding to the nearest level would keep only {trials.share_kept(rounded):.0%} of "
            f"what weights have moved since the restore, this keeps {trials.share_kept(chosen):.0%}"
        )
        return Found("scale", chosen, chosen, (note,))
    # If little is allowed, even the finest grid may fail by chance: outliers are rounded to 16 bits.
    if search(start, earlier, False) is None:
        return NOTHING_GOOD_ENOUGH
    most = trials.keeping_most()
    note = (
        f"{in_short(most)}: keeps only {trials.share_kept(most):.0%} of what weights have moved since the restore, the "
        "most of what was good enough; stochastic rounding was not"
    )
    return Found("scale", most, most, (note,))


def history_after(
    history: History, limit: float, found: GridConfiguration, degradations: Mapping[int, float]
) -> History:
    """Return the history after a search for a limit. degradations: of the scale exponents that were scored."""
    # The finest grid is scored after a search that found nothing. Noise is all that such a score tells.
    near = {k: value for k, value in degradations.items() if abs(k - found.scale) <= LONGEST_MOVE}
    now = degradation_at_scale_1(near, limit)
    at_scale_1 = (*(history.scale.at_scale_1 if history.scale else ()), *(() if now is None else (now,)))
    return replace(history, scale=LastScale(found.scale, at_scale_1[-REMEMBERED:]))


GRID = Method(
    coder="conditional",
    quantizes_vectors=True,
    quantizes_moments=True,
    supports_shards=True,
    uses_mean_squares=True,
    adds_up_steps=True,
    accumulate=sums_of_squares,
    mean_square=float,  # what was recorded is the sum of mean squares
    prepare=_prepare,
)
