"""Quantizes tensors with a bound, and averages of weights at the preset's error."""

from __future__ import annotations

from collections.abc import Collection

from dynaquant.engine.forms.bounded import BoundedTensor
from dynaquant.engine.quantize.bounds import average_bounds, quantize_bounded
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.saving.presets import Preset
from dynaquant.saving.source import Source
from dynaquant.training.objects import MAIN


def bounded_tensors(source: Source, preset: Preset | None) -> dict[str, BoundedTensor]:
    """Return the tensors of role ``bound`` and averages of weights, quantized, by name. Collective.

    preset: None stores averages exactly. Extras that are not divided may differ between ranks, so each rank quantizes
    its own.
    """
    tensors, labels, shards = source.tensors, source.labels, source.shards

    def quantized(names: Collection[str], shards: Shards) -> dict[str, BoundedTensor]:
        bounds = {name: bound for name in names if (bound := labels[name].bound) is not None}
        if preset is not None:
            averages = {name: tensors[name] for name in names if labels[name].role == "average"}
            bounds |= average_bounds(averages, preset.average_error, shards)
        return quantize_bounded(tensors, bounds, shards.held, shards.reduce)

    def is_alone(name: str) -> bool:
        return name.partition(".")[0] not in MAIN and name not in shards.held

    together, alone = [n for n in tensors if not is_alone(n)], [n for n in tensors if is_alone(n)]
    return {**quantized(together, shards), **quantized(alone, WHOLE)}
