"""What the whole training may lose by restores, and how much of that one checkpoint may use.

A restore worsens the metric by the degradation of its checkpoint. Where a schedule changes the learning rate, and the
learning rate scales the updates, training heals this, but less and less as the rate falls. Elsewhere nothing says that
it heals, and restores add up. So checkpoints late in a schedule, and those after many restores, are stored more
precisely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

HEALING = 4.0
"""A degradation heals with this power of the sum of all learning rates so far: if that sum doubles, a sixteenth is
left. Fitted to trainings with restores (docs/decisions.md, "How much may a checkpoint lose late in a training?")."""
SHARE_OF_ONE = 0.25
"""The share of what is left of the budget that one restore may use, if nothing says how many there will be."""
LEAST_SHARE = 0.05
"""A checkpoint may always use this share of the largest degradation, however little of the budget is left."""
HEALED = 0.01
"""A restore is forgotten when this share of its degradation is left."""
SAME_RATE = 1e-3
"""A learning rate has changed if it differs from that at the save before by more than this share."""
_SCALED_BY_RATE = ("Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
"""Optimizers of ``torch.optim`` whose updates have a size that only the learning rate changes in the long run. Adagrad
divides by all gradients so far, and Adadelta, Rprop and LBFGS choose the size of their updates themselves."""


@dataclass(frozen=True)
class Restore:
    """One restore. degradation: of its checkpoint. learned: the sum of learning rates at its step."""

    degradation: float
    learned: float


@dataclass(frozen=True)
class TrainingPosition:
    """How far a training is at a save.

    step: of the training; its checkpoint may have another number. rate: the learning rate. has_schedule: whether a
    schedule has changed it. scaled: whether the learning rate scales the updates of all optimizers. partly: whether
    only some parameters have a schedule.
    """

    step: int
    rate: float
    has_schedule: bool = False
    scaled: bool = False
    partly: bool = False

    @classmethod
    def of(cls, step: int, optimizers: Sequence[Optimizer]) -> TrainingPosition:
        """Return the position of a training with these optimizers."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return cls.of_groups(step, learning_rate(optimizers), groups, scaled_by_rate(optimizers))

    @classmethod
    def of_groups(cls, step: int, rate: float, groups: Sequence[Mapping[str, Any]], scaled: bool) -> TrainingPosition:
        """Return the position of a training with these groups of parameters."""
        return cls(step, rate, has_schedule(groups), scaled, is_partly_scheduled(groups))


@dataclass(frozen=True)
class TrainingBudget:
    """The account of one training. A save adds the steps since the last one, a restore adds its degradation.

    total: the largest relative loss of quality at the end of the training, as predicted. largest: the largest
    degradation of one checkpoint. expected: how many restores the user expects in the whole training. scaled: whether
    the learning rate scales the updates of all optimizers. partly: whether only some parameters have a schedule.
    learned: the sum of the learning rates of all steps so far. rate, highest: the learning rate at the last save, and
    the highest one of any save. changed: whether it has changed since the save before. step: of the last save. count:
    of restores so far. restores: those still felt.
    """

    total: float
    largest: float
    expected: int | None = None
    scaled: bool = False
    partly: bool = False
    learned: float = 0.0
    rate: float = 0.0
    highest: float = 0.0
    changed: bool = False
    step: int = 0
    count: int = 0
    restores: tuple[Restore, ...] = ()

    def at(self, position: TrainingPosition) -> TrainingBudget:
        """Return the account at a save."""
        step, rate = position.step, position.rate
        if not (math.isfinite(rate) and rate >= 0):
            rate = self.rate
        mean = (self.rate + rate) / 2 if self.step else rate
        learned = self.learned + mean * max(step - self.step, 0)
        first = position.has_schedule
        changed = abs(rate - self.rate) > SAME_RATE * max(rate, self.rate) if self.step > 0 else first
        now = replace(self, learned=learned, rate=rate, highest=max(self.highest, rate), changed=changed, step=step)
        now = replace(now, scaled=position.scaled, partly=position.partly)
        return replace(now, restores=tuple(each for each in self.restores if now._left(each) > HEALED))

    @property
    def heals(self) -> bool:
        """Whether anything says that errors heal: a schedule is changing the learning rate, which scales the updates.

        While it stays the same, nothing says how long it will, and whether errors have time to heal.
        """
        return self.scaled and self.changed and not self.partly and self.highest > 0

    @property
    def assumed(self) -> str:
        """What is assumed of errors, for the record."""
        if self.heals:
            return "errors heal as fast as the learning rate tells"
        if not self.scaled:
            return "restores add up, because the learning rate does not say how fast the optimizer heals errors"
        if self.partly:
            return "restores add up, because only some parameters have a schedule for the learning rate"
        return "restores add up, because the learning rate does not change"

    @property
    def lasting(self) -> float:
        """The share of a degradation of now that will be left at the end of the training, as expected.

        The learning rate says how far the schedule is: while it is as high as ever, a long time is left to heal.
        """
        return 1 - self.rate / self.highest if self.heals else 1.0

    @property
    def felt(self) -> float:
        """What restores have left until now: their degradations, as far as they have not healed."""
        return sum(each.degradation * self._left(each) for each in self.restores)

    @property
    def spent(self) -> float:
        """The part of the budget that restores have used: their degradations, as far as they will be left."""
        return self.lasting * self.felt

    @property
    def allowed(self) -> float:
        """The degradation that a checkpoint may have now.

        Together with what restores have left, it is at most that of one checkpoint, however high the learning rate is:
        unless restores have left nearly as much, because LEAST_SHARE is always allowed.
        """
        allowed = self.largest - self.felt
        if self.lasting > 0:
            allowed = min(allowed, self._share_of_one * (self.total - self.spent) / self.lasting)
        return max(allowed, LEAST_SHARE * self.largest)

    @property
    def _share_of_one(self) -> float:
        """The share of what is left of the budget that the next restore may use."""
        left = 0 if self.expected is None else self.expected - self.count
        return 1 / left if left > 0 else SHARE_OF_ONE

    def _left(self, restore: Restore) -> float:
        """Return the share of a restore's degradation that has not healed yet."""
        if not self.heals:
            return 1.0
        if not 0 < restore.learned < self.learned:
            return 1.0 if restore.learned >= self.learned else 0.0
        return math.pow(restore.learned / self.learned, HEALING)

    def restored(self, degradation: float) -> TrainingBudget:
        """Return the account after a restore of the checkpoint of the last save. degradation: of that checkpoint."""
        counted = replace(self, count=self.count + 1)
        if not (math.isfinite(degradation) and degradation > 0):
            return counted
        return replace(counted, restores=(*self.restores, Restore(degradation, self.learned)))

    def to_json(self) -> dict[str, Any]:
        """Return the account as a record keeps it."""
        return {
            "total": self.total,
            "spent": self.spent,
            "felt": self.felt,
            "learned": self.learned,
            "rate": self.rate,
            "highest": self.highest,
            "changed": self.changed,
            "assumed": self.assumed,
            "count": self.count,
            "step": self.step,
            "restores": [[each.degradation, each.learned] for each in self.restores],
        }

    def continued(self, data: Any, step: int, rate: float) -> TrainingBudget:
        """Return this budget with the account of a restored checkpoint.

        data: from its record. If it is not valid, the account begins anew, as if all steps so far had had the present
        learning rate. step: of the checkpoint. rate: the learning rate now.
        """
        try:
            account: dict[str, Any] = {key: _not_negative(data[key]) for key in ("learned", "rate", "highest")}
            account["restores"] = tuple(Restore(*map(_not_negative, each)) for each in data["restores"])
            account |= {"count": int(_not_negative(data["count"])), "changed": data["changed"] is True}
        except (KeyError, OverflowError, TypeError, ValueError):
            account = {
                "learned": rate * step,
                "rate": rate,
                "highest": rate,
                "restores": (),
                "count": 0,
                "changed": False,
            }
        return replace(self, step=step, **account)


def scaled_by_rate(optimizers: Sequence[Optimizer]) -> bool:
    """Whether the learning rate alone scales the updates of all optimizers, as far as that is known."""
    known = [getattr(torch.optim, name) for name in _SCALED_BY_RATE if hasattr(torch.optim, name)]
    return bool(optimizers) and all(type(optimizer) in known for optimizer in optimizers)


def learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """Return the mean learning rate of all parameters; 0 without optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return mean_learning_rate(groups, [sum(parameter.numel() for parameter in group["params"]) for group in groups])


def mean_learning_rate(groups: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> float:
    """Return the mean learning rate of groups of parameters; 0 without groups. counts: the weights of the groups."""
    total = sum(_number(group) * count for group, count in zip(groups, counts, strict=True))
    return total / max(sum(counts), 1)


def has_schedule(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a schedule of ``torch.optim`` has changed a learning rate: it keeps the first one in ``initial_lr``."""
    return any("initial_lr" in group and float(group["initial_lr"]) != _number(group) for group in groups)


def is_partly_scheduled(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether schedules of ``torch.optim`` change the learning rates of some groups of parameters, not of all."""
    return len({"initial_lr" in group for group in groups if group.get("params")}) > 1


def _number(group: Mapping[str, Any]) -> float:
    rate = group.get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float | np.number | Tensor) else 0.0


def _not_negative(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return float(value)
