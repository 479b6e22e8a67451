"""How far a training has moved each of its tensors since it began, measured on a sample.

Pretrained weights move little: what they hold was learned before, and this training cannot learn it again
(docs/decisions.md, "What must a checkpoint keep that the metric does not see?").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.ranks.dtensors import local_of
from dynaquant.saving.movement import sampled_values
from dynaquant.training.objects import parameters_of

SAMPLE = 1_024
"""Values of the sample of one tensor, at most."""
PER_OCTAVE = 4
"""A record holds displacements as whole numbers of fractions of an octave."""


@dataclass(eq=False)
class Displacements:
    """The displacements of a model's parameters since the training began; by default, of no parameters.

    Begins with the present values, and goes on from those of a record: what lies before and after a restore is added
    as if at right angles.

    reference: samples of the parameters by name, at the beginning or at the last restore. earlier: mean squares by
    name, before the last restore.
    """

    model: nn.Module = field(default_factory=nn.Module)
    reference: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    earlier: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_here(cls, model: nn.Module) -> Displacements:
        """Return the displacements of a training that begins with the present values."""
        return cls(model, sampled_values(_parameters(model), SAMPLE))

    def begin_here(self) -> None:
        """Take the present values as the reference: pretrained weights may have been loaded since the constructor."""
        self.reference = sampled_values(_parameters(self.model), SAMPLE)

    def continued(self, stored: Any) -> Displacements:
        """Return those of a restored training. stored: from its record; invalid content is ignored."""
        stored = stored if isinstance(stored, Mapping) else {}
        earlier = {
            name: 2.0 ** (2 * value / PER_OCTAVE)
            for name, value in stored.items()
            if isinstance(name, str) and isinstance(value, int) and abs(value) < 1000
        }
        return replace(self.from_here(self.model), earlier=earlier)

    def since_the_start(self, shards: Shards) -> dict[str, float]:
        """Return the root mean square displacement of each parameter, by name in the state. Collective with shards."""
        parameters = _parameters(self.model)  # a rank may hold nothing of a tensor, but must count it
        squares_of = _squares(sampled_values(parameters, SAMPLE), self.reference)
        sums = {name: squares_of.get(name, [0.0, 0.0]) for name in parameters}
        return {
            name: math.sqrt(self.earlier.get(name, 0.0) + (squares / count if count else 0.0))
            for name, (squares, count) in shards.sums(sums).items()
        }


def to_json(displaced: Mapping[str, float]) -> dict[str, int]:
    """Return displacements as a record keeps them."""
    return {name: round(PER_OCTAVE * math.log2(value)) for name, value in displaced.items() if 0 < value < math.inf}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds of the parameters that can be quantized. Tensor subclasses may be anything."""
    local = {name: local_of(parameter) for name, parameter in parameters_of(model).items()}
    return {n: p for n, p in local.items() if type(p) in (Tensor, nn.Parameter) and p.dtype in QUANTIZABLE_DTYPES}


def _squares(
    now: Mapping[str, NDArray[np.float64]], before: Mapping[str, NDArray[np.float64]]
) -> dict[str, list[float]]:
    """Return the sum of squared changes of each sample, and the number of values that it adds up."""
    names = [name for name, values in now.items() if name in before and before[name].shape == values.shape]
    if not names:
        return {}
    # One array for all: a model may have ten thousand parameters.
    begins = np.cumsum([0, *(len(now[name]) for name in names[:-1])])
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values
        changed = np.square(np.concatenate([now[n] for n in names]) - np.concatenate([before[n] for n in names]))
    known = np.isfinite(changed)
    sums = np.add.reduceat(np.where(known, changed, 0.0), begins), np.add.reduceat(known, begins, dtype=np.float64)
    return dict(zip(names, np.stack(sums, axis=1).tolist(), strict=True))
