"""How far the weights have moved since the last checkpoint, measured on a sample (``every=Moved(…)``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dynaquant.engine.quantize.grid_weights import effective_mean_squares
from dynaquant.engine.reduction import Numbers, Reduce
from dynaquant.options import Moved
from dynaquant.ranks.dtensors import local_of, reshard
from dynaquant.state.roles import untrained
from dynaquant.state.subclasses import is_strided
from dynaquant.training.objects import models_of, parameters_of

log = logging.getLogger("dynaquant")

SAMPLE, FEWEST, MOST = 16_384, 128, 4_096
"""Values of the sample: about how many of the whole model, and the fewest and the most of one tensor."""
PRECISION = 50
"""The weights are looked at again after 1 / PRECISION of the steps since the last checkpoint, or later."""
APPROACH = 0.8
"""The share of the steps that are left, by the movement so far, after which the weights are looked at again."""


@dataclass(frozen=True)
class _Place:
    """Where a parameter is in its module, and its shape."""

    module: nn.Module
    key: str
    shape: torch.Size


@dataclass(frozen=True)
class _SampledWeights:
    """A sample of the weights, by name: places, values, and what the square of a value of each counts."""

    places: Mapping[str, _Place]
    values: Mapping[str, NDArray[np.float64]]
    factors: Mapping[str, float]

    @property
    def present(self) -> dict[str, NDArray[np.float64]]:
        """The values of the same places now, without parameters that are gone or have another shape."""
        return _values({name: _sample(p, len(self.values[name])) for name, p in _present(self.places).items()})


class Movement:
    """The movement of the weights since a reference, and whether it has reached a distance.

    objects: the objects of the training, by name. interval: the expected number of steps to the distance, if known.
    reduce: adds up the sums of all ranks, which may hold parts or other values; ``reached`` is collective then.
    """

    def __init__(
        self, moved: Moved, objects: Mapping[str, Any], interval: int | None = None, reduce: Reduce | None = None
    ) -> None:
        self._moved, self._objects, self._reduce = moved, objects, reduce
        self._reference: _SampledWeights | None = None
        self._next = self.first_look(interval)
        self._reached = False
        self._warned = False

    @staticmethod
    def first_look(interval: int | None) -> int:
        """Return the steps after which the weights are looked at first. interval: as in the constructor."""
        return max(1, (interval or 0) // 2)

    def from_here(self, mean_squares: Mapping[str, float], interval: int | None) -> Movement:
        """Return the movement from the present weights.

        mean_squares: F for some or all weights, by name in the state. interval: as in the constructor.
        """
        new = Movement(self._moved, self._objects, interval, self._reduce)
        new._reference = self._sampled(mean_squares)
        return new

    def reached(self, steps: int) -> bool:
        """Return whether the distance is reached. steps: since the reference; the weights are read at some of them.

        The first call takes the present weights as the reference if there is none. A distance once reached stays so.
        """
        if self._reference is None:
            self._reference = self._sampled({})
            return False
        if self._reached or steps < self._next:
            return self._reached
        distance = self.distance()
        self._reached = distance >= self._moved.distance  # not if it is NaN
        if math.isnan(distance) and not self._warned:
            log.warning("no weight has a finite value: by its movement (every=Moved), no checkpoint is due")
            self._warned = True
        left = steps * (self._moved.distance / distance - 1) if distance > 0 else math.inf
        self._next = steps + max(1, steps // PRECISION, int(min(steps, APPROACH * left)))
        return self._reached

    def distance(self) -> float:
        """Return the movement since the reference. NaN if no value of the sample is finite, then and now.

        Parameters that are new since then, or that have another shape, do not count.
        """
        assert self._reference is not None
        reshard(models_of(self._objects))
        present = self._reference.present
        before, now = _in_one([self._reference.values[name] for name in present]), _in_one(present.values())
        factors = _in_one(np.full(len(values), self._reference.factors[name]) for name, values in present.items())
        if not (finite := np.isfinite(before) & np.isfinite(now)).all():
            before, now, factors = before[finite], now[finite], factors[finite]
        sums = np.array([float(factors @ np.square(values)) for values in (now - before, now)] + [len(now)])
        moved, size, count = (sums if self._reduce is None else self._reduce(Numbers(sums)).sums).tolist()
        if not count:
            return math.nan
        if moved == 0:
            return 0.0
        return math.sqrt(moved / size) if size > 0 else math.inf

    def _sampled(self, mean_squares: Mapping[str, float]) -> _SampledWeights:
        places = self._places()
        weights = _present(places)
        whole = max(sum(weight.numel() for weight in weights.values()), 1)
        values = _values(
            {name: _sample(p, min(max(SAMPLE * p.numel() // whole, FEWEST), MOST)) for name, p in weights.items()}
        )
        sizes = {name: max(p.numel(), 1) for name, p in weights.items()}  # a rank may hold nothing of a tensor
        squares = {name: sizes[name] * _mean_square(values[name]) for name in weights}
        effective = effective_mean_squares(sizes, squares, mean_squares)
        factors = {name: effective[name] * sizes[name] / max(len(values[name]), 1) for name in weights}
        return _SampledWeights(places, values, factors)

    def _places(self) -> dict[str, _Place]:
        """Return the first place of each weight that trains, by name in the state."""
        model, fixed = models_of(self._objects), untrained(self._objects)
        names = {id(p): name for name, p in parameters_of(model).items()}
        found: dict[str, _Place] = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is not None and p.is_floating_point() and is_strided(p) and p.numel():
                    found.setdefault(names[id(p)], _Place(module, key, p.shape))
        return {name: place for name, place in found.items() if name not in fixed}


def _present(places: Mapping[str, _Place]) -> dict[str, Tensor]:
    """Return what this rank holds of the parameters that are in these places now, in the same shapes."""
    present = {name: place.module._parameters.get(place.key) for name, place in places.items()}
    return {n: local_of(p) for n, p in present.items() if p is not None and p.shape == places[n].shape}


def sampled_values(parameters: Mapping[str, Tensor], size: int) -> dict[str, NDArray[np.float64]]:
    """Return up to ``size`` evenly spaced values of each parameter that is strided and not empty."""
    return _values({name: _sample(p, size) for name, p in parameters.items() if is_strided(p) and p.numel()})


def _values(samples: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    """Return the values of samples. Copies all of one device and dtype to the host at once."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, view in samples.items():
        groups.setdefault((view.device, view.dtype), []).append(name)
    found: dict[str, NDArray[np.float64]] = {}
    for names in groups.values():
        together, begin = torch.cat([samples[name] for name in names]).cpu().to(torch.float64).numpy(), 0
        for name in names:
            end = begin + len(samples[name])
            found[name], begin = together[begin:end], end
    return {name: found[name] for name in samples}


def _in_one(arrays: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return arrays, maybe none, as one."""
    return np.concatenate([np.empty(0), *arrays])


def _sample(parameter: Tensor, size: int) -> Tensor:
    """Return a view of up to ``size`` evenly spaced values, in the order of the memory."""
    tensor = parameter.detach()
    if tensor.numel() <= size and tensor.is_contiguous():
        return tensor.view(-1)
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.ndim), key=lambda i: -strides[i]))
    flat = tensor.reshape(-1)
    if len(flat) <= size:
        return flat
    pace = max(len(flat) // size, 1)
    pace -= pace > 1 and pace % 2 == 0  # rows often have an even length: an even pace would stay in some columns
    return flat[::pace][:size]


def _mean_square(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.square(finite).mean()) if len(finite) else 0.0
