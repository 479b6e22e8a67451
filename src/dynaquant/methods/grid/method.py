"""The method ``"grid"``: uniform grids, whose steps follow the sensitivity of the loss (method 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.quantize.grid_weights import GridWeights, grid_weights
from dynaquant.engine.quantize.knobs import MAX_SCALE, SCALES_PER_OCTAVE, GridConfiguration, Knobs
from dynaquant.engine.tensors.codebook import Grid
from dynaquant.methods.grid.search import history_after, search_grid
from dynaquant.methods.method import WeightsToPrepare
from dynaquant.ranks.group import Group
from dynaquant.search.decision import Found, Search
from dynaquant.search.displacement import keeps_enough
from dynaquant.search.judge import DistortionJudge, JudgedBy
from dynaquant.search.search_memory import SearchMemory
from dynaquant.search.trials import Trials
from dynaquant.training.gradients import sums_of_squares


class GridMethod:
    """Uniform grids with conditional entropy coding. Records the sum of each tensor's mean squared gradients."""

    coder: Coder = "conditional"
    quantizes_vectors: bool = True
    quantizes_moments: bool = True
    supports_shards: bool = True
    uses_mean_squares: bool = True
    adds_up_steps: bool = True
    accumulate = staticmethod(sums_of_squares)

    def mean_square(self, recorded: Tensor) -> float:
        """Return what was recorded: the sum of mean squares."""
        return float(recorded)

    def prepare(self, weights: WeightsToPrepare, group: Group) -> tuple[PreparedForGrid, Sequence[str]]:
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


BEYOND_ESTIMATE = SCALES_PER_OCTAVE // 2
"""A grid may be so much coarser than the estimate says if a metric in coarse steps does not forbid it. The estimate
errs on the safe side."""


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
