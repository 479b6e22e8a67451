"""Quantize all moments of a checkpoint (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.cached import cached_property
from dynaquant.engine import kernels
from dynaquant.engine.forms.form import Form
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.units import ScaledMoment, SecondMoment
from dynaquant.engine.label import Label, Role
from dynaquant.engine.quantize.epsilon import Epsilon, epsilon_with
from dynaquant.engine.quantize.first_moment import quantize_first_moment, quantize_momentum
from dynaquant.engine.quantize.log_grid import NO_EXTREMES, SMALLEST, Extremes
from dynaquant.engine.quantize.second_moment import quantize_second_moment
from dynaquant.engine.quantize.small_moments import (
    quantize_small_first_moment,
    quantize_small_second_moment,
    small_values,
)
from dynaquant.engine.reduction import Reduction, run_in_windows, total
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.shard import Shard

_SECOND_OF_FIRST = {"exp_avg": ("max_exp_avg_sq", "exp_avg_sq")}
"""For a first moment's key, the keys of the second moments whose root divides it in an update. The first one found
counts.

``momentum_buffer`` is not here: it is the update itself.
"""
_NEVER_FORGETS = "sum"
"""The key of Adagrad's second moment. The error of a restore lasts until the end; that of the next one adds to it."""
_FED_BACK = {"square_avg": "acc_delta"}
"""The key of Adadelta's second moment, and that of the mean of its past updates. An update is the root of the mean, by
the root of the moment, so an error becomes part of all later updates."""
LASTING_SHARE, FINEST_LASTING = 0.15, 0.03
"""The tolerance of second moments whose errors last, as a share of that of others, and the finest that this may mean:
docs/decisions.md, "How coarse may a second moment be?"."""


def quantize_moments(
    tensors: Mapping[str, Tensor],
    labels: Mapping[str, Label],
    first_tolerance: float,
    second_tolerance: float,
    first_tolerances: Mapping[str, float] = MappingProxyType({}),
    shards: Shards = WHOLE,
    epsilons: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Form]:
    """Return the moments that can be quantized within the tolerances, by name. Store the others exactly.

    tensors, labels: of a whole state. first_tolerances: those of single first moments, by name, in place of
    ``first_tolerance``. second_tolerance: those of Adagrad and Adadelta get a smaller one. epsilons: the ε of the
    optimizer, as far as known, by the state of a parameter: the name of its moments without their key. These moments
    stay exact:

    - moments that are empty or not finite;
    - a first moment whose second moment stays exact, or lies on other ranks;
    - a first moment that lacks the second moment its key calls for, because its effect on an update is unknown (Adamax
      divides it by ``exp_inf``, Lion takes its sign). With an infinite tolerance it becomes zero instead.

    In a sharded training, the tensors are local, and so are the results. shards: what they are of the whole tensors.
    Then:

    - all ranks call this with the same names in the same order;
    - each element is given by one rank: others that hold a copy give an empty tensor and ``Shard.nothing``;
    - a first moment is divided over the ranks as its second moment is.

    All ranks come to the same decisions, and get the same kinds of forms. These are the decisions of one process that
    holds all elements, but for the last bits of sums.
    """
    moments = _Moments(tensors, labels, first_tolerance, second_tolerance, first_tolerances, shards, epsilons)
    seconds = run_in_windows(moments.named("second_moment"), moments.second, moments.size, shards.reduce)
    firsts = run_in_windows(moments.named("first_moment"), partial(moments.first, seconds), moments.size, shards.reduce)
    return {name: stored for name, stored in {**seconds, **firsts}.items() if stored is not None}


@dataclass(frozen=True)
class _Moments:
    """The moments of a state, as ``quantize_moments`` takes them. Each method decides about one of them, by name."""

    tensors: Mapping[str, Tensor]
    labels: Mapping[str, Label]
    first_tolerance: float
    second_tolerance: float
    first_tolerances: Mapping[str, float]
    shards: Shards
    epsilons: Mapping[str, float]

    def named(self, role: Role) -> list[str]:
        """Return the names of all moments of a role."""
        return [name for name in self.tensors if self.labels[name].role == role]

    def size(self, name: str) -> int:
        """Return how many numbers a decision holds in memory, at most."""
        # Sums of rows and columns are as long as those of the whole tensor.
        return self.tensors[name].numel() + sum(self._shard(name).shape)

    def second(self, name: str) -> Reduction[SecondMoment | None]:
        """Return a second moment, quantized, or None."""
        tensor, epsilon, tolerance = self.tensors[name], self._epsilon(name), self.second_tolerance
        if self._error_lasts(name):
            tolerance = min(tolerance, max(LASTING_SHARE * tolerance, FINEST_LASTING))
        if (values := self._small.get(name)) is not None:
            return quantize_small_second_moment(values, tensor.shape, tolerance, epsilon)
        shard, extremes = self._shard(name), self._extremes_of_second(name)
        if (yield from _usable(extremes and extremes[:2], shard, lowest=0.0)):
            return (yield from quantize_second_moment(tensor, tolerance, shard, epsilon, extremes or NO_EXTREMES))
        return None

    def first(
        self, seconds: Mapping[str, SecondMoment | None], name: str
    ) -> Reduction[ScaledMoment | QuantizedTensor | None]:
        """Return a first moment, quantized, or None. seconds: what ``second`` has returned."""
        divisor = _second_of(name, self.tensors)
        if divisor is None:
            return (yield from self._momentum(name))
        stored, tolerance = seconds.get(divisor), self.first_tolerances.get(name, self.first_tolerance)
        if stored is None:
            return None
        tensor, epsilon = self.tensors[name], self._epsilon(name)
        are_small = divisor in self._small and tensor.shape == stored.shape and tolerance < math.inf
        if are_small and (values := self._small.get(name)) is not None:
            return quantize_small_first_moment(values, stored, divisor, tolerance, epsilon)
        shard = self._shard(name)
        alike = self._shard(divisor) == shard
        if tensor.is_cpu and tolerance < math.inf and not self.shards.divided:
            usable = alike and tensor.numel() > 0  # its levels show whether all values are finite
        else:
            usable = yield from _usable(self._extremes(name), shard, alike=alike)
        if usable:
            own = shard if self.shards.divided else None
            return (yield from quantize_first_moment(tensor, stored, divisor, tolerance, own, epsilon))
        return None

    def _momentum(self, name: str) -> Reduction[QuantizedTensor | None]:
        lacks_second = name.rpartition(".")[2] in _SECOND_OF_FIRST
        # With a tolerance of its own it would be exact, and as large as the weights.
        tolerance = self.first_tolerance if lacks_second else self.first_tolerances.get(name, self.first_tolerance)
        if lacks_second and tolerance < math.inf:
            return None
        shard = self._shard(name)
        if (yield from _usable(self._extremes(name), shard)):
            return (yield from quantize_momentum(self.tensors[name], tolerance, shard))
        return None

    def _error_lasts(self, name: str) -> bool:
        """Whether the optimizer does not forget the error of a second moment within some steps."""
        state, _, key = name.rpartition(".")
        return key == _NEVER_FORGETS or (key in _FED_BACK and f"{state}.{_FED_BACK[key]}" in self.tensors)

    def _shard(self, name: str) -> Shard:
        return self.shards.of(name, self.tensors[name])

    def _epsilon(self, name: str) -> Epsilon:
        return epsilon_with(self.epsilons.get(name.rpartition(".")[0], 0.0))

    def _extremes(self, name: str) -> tuple[float, float] | None:
        if name in self._extremes_on_devices or not self.tensors[name].numel():
            return self._extremes_on_devices.get(name)
        return kernels.for_device(self.tensors[name].device).extremes(self.tensors[name])  # most on the host need none

    def _extremes_of_second(self, name: str) -> Extremes | None:
        if name in self._extremes_of_seconds or not self.tensors[name].numel():
            return self._extremes_of_seconds.get(name)
        return kernels.for_device(self.tensors[name].device).extremes_from(self.tensors[name], SMALLEST)

    @cached_property
    def _all(self) -> list[str]:
        return [*self.named("second_moment"), *self.named("first_moment")]

    @cached_property
    def _small(self) -> dict[str, NDArray[np.float32]]:
        """The values of the moments that take one native call each."""
        # All ranks must take part in the decisions about a tensor, also about one that a single rank gives as a whole.
        alone = [] if self.shards.divided else self._all
        return {name: values for name in alone if (values := small_values(self.tensors[name])) is not None}

    @cached_property
    def _extremes_on_devices(self) -> dict[str, tuple[float, float]]:
        """The extremes of the first moments on devices, which cross together."""
        return kernels.all_extremes(self._on_devices("first_moment"))

    @cached_property
    def _extremes_of_seconds(self) -> dict[str, Extremes]:
        """The extremes of the second moments on devices, which cross together."""
        return kernels.all_extremes_from(self._on_devices("second_moment"), SMALLEST)

    def _on_devices(self, role: Role) -> dict[str, Tensor]:
        return {name: self.tensors[name] for name in self.named(role) if self.tensors[name].device.type != "cpu"}


def _usable(
    extremes: tuple[float, float] | None, shard: Shard, lowest: float = -math.inf, alike: bool = True
) -> Reduction[bool]:
    """Whether a tensor has elements, and all are finite and at least ``lowest``. alike: also needed on every rank.

    extremes: of the values that this rank holds; None if it holds none.
    """
    if not shard.shape.numel():
        return False
    usable = alike
    if extremes is not None:
        least, most = extremes  # NaN if any value is NaN
        usable = usable and lowest <= least and -math.inf < least and most < math.inf
    # A sum, because a NaN could get lost in a maximum.
    return not (yield from total(not usable))[0]


def _second_of(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a first moment's second moment, or None if the state has none."""
    state, _, key = name.rpartition(".")
    names = (f"{state}.{second}" for second in _SECOND_OF_FIRST.get(key, ()))
    return next((second for second in names if second in tensors), None)
