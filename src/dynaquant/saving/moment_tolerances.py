"""How coarse moments may be: it follows from the steps of training that a restore would lose by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dynaquant.engine.quantize.step_limits import StepLimits
from dynaquant.engine.shards import Shards
from dynaquant.ranks.dtensors import local_of
from dynaquant.saving.movement import sampled_values
from dynaquant.saving.presets import DROPPED, Preset
from dynaquant.training.first_moments import MomentWindow

ROUNDING = 1 + 1e-9
LOST_BY_NOISE = 0.1
"""A restore loses this share of the steps that a moment remembers for an error t² = 1 of a stored moment. Measured:
docs/decisions.md, "How much does a restore lose without first moments?"."""
LOST_BY_NOISE_OF_ROWS = 0.4
"""The same for embeddings. Few of their rows have gradients in a step; the others keep what noise has done to them:
docs/decisions.md, "How much does a restore lose by noise in first moments?"."""
UNUSED, FEW = 0.02, 0.05
"""A row has had no gradient for some thirty steps if its first moment is at most this share of the root of its second
one. An embedding in which fewer rows than the other share are unused counts as any other matrix."""
_ROWS = 1_024
"""Rows of an embedding that tell whether rows are unused."""
LOST_BY_NOISE_OF_SGD = 0.5
"""The same for SGD, whose update is the moment itself: docs/decisions.md, "What about the momentum of SGD?"."""
FINEST, COARSEST = 0.25, 1.4
"""The tolerance of first moments that are kept: about 2 and 0.4 bits per weight."""
OF_SGD, WINDOW_OF_SGD = 0.5, 10.0
"""The tolerance of momentum of SGD, as measured with this window: momentum 0.9. Noise lasts as long as the window, so
in a longer one its square must be smaller: docs/decisions.md, "What about the momentum of SGD?"."""
OF_ROUNDING = 0.25
"""An error of SGD's momentum may displace a weight by this share of what rounding to the largest step may."""
_SAMPLE = 4_096
"""Values of a tensor that tell its size."""
FIRST_BESIDE_EXACT, SECOND_BESIDE_EXACT = 0.35, 0.045
"""The largest tolerances of moments beside exact weights: docs/decisions.md, "How coarse may a second moment be?"."""


@dataclass(frozen=True)
class MomentTolerances:
    """How coarse moments may be: see ``engine/quantize/moments.py``.

    first: of first moments; firsts: those of single ones, by name. second: of second moments.
    """

    first: float
    second: float
    firsts: Mapping[str, float]

    def beside_exact_weights(self) -> MomentTolerances:
        """Return the tolerances where the weights are stored exactly, or almost.

        Such trainings lose more by coarse moments than others do, and fine ones are small beside their weights.
        """

        def finer(tolerance: float) -> float:
            return tolerance if tolerance == DROPPED else min(tolerance, FIRST_BESIDE_EXACT)

        firsts = {name: finer(tolerance) for name, tolerance in self.firsts.items()}
        return MomentTolerances(finer(self.first), min(self.second, SECOND_BESIDE_EXACT), firsts)


def by_unused_rows(
    windows: Mapping[str, MomentWindow], tensors: Mapping[str, Tensor], shards: Shards
) -> dict[str, MomentWindow]:
    """Return the windows, but those of embeddings whose rows are all in use as those of other matrices.

    Such are positions, characters, and tables that are also the head of a model. Collective with shards. tensors: by
    name, first and second moments among them.
    """
    tables = [name for name, window in windows.items() if window.by_row and _second_of(name) in tensors]
    counts = shards.sums({name: _unused_rows(tensors[name], tensors[_second_of(name)]) for name in tables})
    in_use = {name: replace(windows[name], by_row=False) for name, (n, rows) in counts.items() if n < FEW * rows}
    return {**windows, **in_use}


def _second_of(first: str) -> str:
    return f"{first.rpartition('.')[0]}.exp_avg_sq"


def _unused_rows(first: Tensor, second: Tensor) -> list[float]:
    """Return how many of some rows of this rank's part are unused, and how many these are."""
    own, root = local_of(first).detach(), local_of(second).detach()
    if own.ndim < 2 or not own.numel() or own.shape != root.shape:
        return [0.0, 0.0]
    pace = max(len(own) // _ROWS, 1)
    size, largest = own[::pace].float().abs().amax(1), root[::pace].float().sqrt().amax(1)
    return [float((size <= UNUSED * largest).sum()), float(len(size))]


def bounded_by_weights(
    tolerances: Mapping[str, float],
    windows: Mapping[str, MomentWindow],
    weights: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    limits: StepLimits,
    shards: Shards,
) -> dict[str, float]:
    """Return the tolerances, but with that of SGD's momentum so fine that it moves no weight further than a grid may.

    An error e of the momentum displaces a weight by ``lr / (1 - β) · e`` until it is forgotten. Early in a training,
    that can be half of a small weight: docs/decisions.md, "What about the momentum of SGD?". Collective with shards.

    tolerances, windows: by name of the moment. weights: the name of each moment's weight. tensors: moments and weights,
    by name. limits: of the weights' grid steps.
    """
    reach = {
        name: window.reach
        for name, window in windows.items()
        if window.reach is not None and tolerances.get(name, DROPPED) < DROPPED
        if name in tensors and weights.get(name) in tensors
    }
    sizes = _sizes({name: tensors[name] for name in {*reach, *(weights[name] for name in reach)}}, shards)
    found = dict(tolerances)
    for name, steps in reach.items():
        most, moved = OF_ROUNDING * limits.moved * sizes[weights[name]] / math.sqrt(12), steps * sizes[name]
        if moved * found[name] > most:
            found[name] = most / moved
    return found


def weights_of(moments: Iterable[str]) -> dict[str, str]:
    """Return the name of the weight of each moment in the state of a training (``state/flatten.py``)."""
    return {name: name.partition(".state.")[2].rpartition(".")[0] for name in moments}


def _sizes(tensors: Mapping[str, Tensor], shards: Shards) -> dict[str, float]:
    """Return the root mean square of each tensor's sample. Collective with shards."""
    samples = sampled_values({name: local_of(tensor) for name, tensor in tensors.items()}, _SAMPLE)
    own = {n: samples.get(n, np.zeros(0)) for n in sorted(tensors)}
    sums = shards.sums({name: [float(np.square(each).sum()), len(each)] for name, each in own.items()})
    return {name: math.sqrt(squares / count) if count else 0.0 for name, (squares, count) in sums.items()}


def tolerances_of(windows: Mapping[str, MomentWindow], preset: Preset, interval: int | None) -> dict[str, float]:
    """Return the tolerance of first moments, ``‖Δu‖/‖u‖`` of an update, by the names of their windows.

    A first moment with the decay β remembers ``1 / (1 - β)`` steps. A restore without it loses some of these steps. If
    they are at most ``preset.lost_steps`` of the steps between two checkpoints, the moment is dropped. Otherwise it is
    kept, as coarsely as that limit allows. A kept moment has its full length, but also noise, by which a restore loses
    steps, too.

    Two moments do not follow that limit, because of their size (docs/decisions.md, "What about the momentum of SGD?").
    That of SGD is kept finely, or dropped where checkpoints lie so far apart that the limit allows a coarser one: noise
    in it costs more than in one that a second moment divides, and a coarse one is worse than none. Muon orthogonalizes
    its moment, so the first updates after a restore without it are noise at full length: it is kept, but for a preset
    that puts size first (docs/decisions.md, "What about the momentum of Muon?").

    interval: the steps between two checkpoints, if known.
    """
    tolerances = {}
    for name, window in windows.items():
        allowed = preset.lost_steps * (interval or 0)
        if window.kept == "always":
            tolerances[name] = preset.muon_tolerance
        elif window.lost <= allowed * ROUNDING:
            tolerances[name] = DROPPED
        elif interval is None:
            continue
        elif window.kept == "fine":
            fine = LOST_BY_NOISE_OF_SGD * OF_SGD**2 * window.steps
            longer = max(window.steps / (WINDOW_OF_SGD * ROUNDING), 1.0)
            tolerances[name] = OF_SGD / math.sqrt(longer) if allowed <= fine * ROUNDING else DROPPED
        else:
            lost = LOST_BY_NOISE_OF_ROWS if window.by_row else LOST_BY_NOISE
            noise = math.sqrt(allowed / (lost * window.steps))
            tolerances[name] = min(max(noise, FINEST), COARSEST)
    return tolerances
