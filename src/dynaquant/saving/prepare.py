"""Prepares weights for the search: reads them once, and keeps what the quantizer needs for every configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from dynaquant.engine.label import Label
from dynaquant.engine.quantize.grid_weights import GridWeights, grid_weights
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights, kmeans_weights
from dynaquant.engine.quantize.step_limits import StepLimits
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.codebook import Grid
from dynaquant.ranks.group import Group
from dynaquant.saving.unchanged_weights import LastWeight


def prepared_for_clusters(
    weights: Mapping[str, Tensor], labels: Mapping[str, Label], gradients: Mapping[str, Tensor], group: Group
) -> KMeansWeights:
    """Return weights prepared for k-means. Collective. gradients: averages of whole gradients, as far as recorded."""
    return group.run_on_all_ranks(lambda: kmeans_weights(weights, labels, gradients))


def prepared_for_grid(
    weights: Mapping[str, Tensor],
    last: Mapping[str, LastWeight],
    mean_squared_gradients: Mapping[str, float],
    restored_step: int,
    step_limits: StepLimits,
    displaced: Mapping[str, float],
    group: Group,
    shards: Shards,
) -> GridWeights:
    """Return weights prepared for uniform grids. Collective.

    last: weights of the last checkpoint; where possible a tensor keeps its grid step. restored_step: seed of the
    stochastic rounding. step_limits: of the preset. displaced: how far each
    weight has moved since the training began. shards: of the weights.
    """

    def prepare() -> GridWeights:
        return grid_weights(weights, mean_squared_gradients, rungs, restored_step, shards, step_limits, displaced)

    grids = {name: weight.quantized.codebook for name, weight in last.items()}
    rungs = {name: grid.rung for name, grid in grids.items() if isinstance(grid, Grid)}
    if shards.divided:  # all ranks have the same numbers
        return group.run_reducing(prepare)
    prepared = group.run_on_all_ranks(prepare)
    # Ranks must decide alike, so all use the numbers of rank 0.
    fisher, squares, steps = group.from_rank_0((prepared.fisher, prepared.squares, prepared.largest_steps))
    return replace(prepared, fisher=fisher, squares=squares, largest_steps=steps)
