"""What the whole training may lose by restores, and how much of that one checkpoint may use.

A restore worsens the metric by the degradation of its checkpoint. Training heals this, but less and less as the
learning rate falls. So checkpoints late in a schedule, and those after many restores, are stored more precisely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

HEALING = 4.0
"""A degradation heals with this power of the sum of all learning rates so far: if that sum doubles, a sixteenth is
left. Fitted to trainings with restores (docs/decisions.md, "How much may a checkpoint lose late in a training?")."""
SHARE_OF_ONE = 0.25
"""The share of what is left of the budget that one restore may use."""
LEAST_SHARE = 0.05
"""A checkpoint may always use this share of the largest degradation, however little of the budget is left."""
HEALED = 0.01
"""A restore is forgotten when this share of its degradation is left."""


@dataclass(frozen=True)
class Restore:
    """One restore. degradation: of its checkpoint. learned: the sum of learning rates at its step."""

    degradation: float
    learned: float


@dataclass(frozen=True)
class TrainingBudget:
    """The account of one training. A save adds the steps since the last one, a restore adds its degradation.

    total: the largest relative loss of quality at the end of the training, as predicted. largest: the largest
    degradation of one checkpoint. learned: the sum of the learning rates of all steps so far. rate, highest: the
    learning rate at the last save, and the highest one of any save. step: of the last save.
    """

    total: float
    largest: float
    learned: float = 0.0
    rate: float = 0.0
    highest: float = 0.0
    step: int = 0
    restores: tuple[Restore, ...] = ()

    def at(self, step: int, rate: float) -> TrainingBudget:
        """Return the account at a save. rate: the learning rate now."""
        if not (math.isfinite(rate) and rate >= 0):
            rate = self.rate
        mean = (self.rate + rate) / 2 if self.step else rate
        learned = self.learned + mean * max(step - self.step, 0)
        still_felt = tuple(each for each in self.restores if _left(each, learned) > HEALED)
        return replace(
            self, learned=learned, rate=rate, highest=max(self.highest, rate), step=step, restores=still_felt
        )

    @property
    def lasting(self) -> float:
        """The share of a degradation of now that will be left at the end of the training, as expected.

        The learning rate says how far the schedule is: while it is as high as ever, a long time is left to heal.
        """
        return 1 - self.rate / self.highest if self.highest > 0 else 0.0

    @property
    def felt(self) -> float:
        """What restores have left until now: their degradations, as far as they have not healed.

        0 if the learning rate is not known: nothing says how fast they heal.
        """
        if self.highest <= 0:
            return 0.0
        return sum(each.degradation * _left(each, self.learned) for each in self.restores)

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
            allowed = min(allowed, SHARE_OF_ONE * (self.total - self.spent) / self.lasting)
        return max(allowed, LEAST_SHARE * self.largest)

    def restored(self, degradation: float) -> TrainingBudget:
        """Return the account after a restore of the checkpoint of the last save. degradation: of that checkpoint."""
        if not (math.isfinite(degradation) and degradation > 0):
            return self
        return replace(self, restores=(*self.restores, Restore(degradation, self.learned)))

    def to_json(self) -> dict[str, Any]:
        """Return the account as a record keeps it."""
        return {
            "total": self.total,
            "spent": self.spent,
            "felt": self.felt,
            "learned": self.learned,
            "rate": self.rate,
            "highest": self.highest,
            "step": self.step,
            "restores": [[each.degradation, each.learned] for each in self.restores],
        }

    def continued(self, data: Any, step: int, rate: float) -> TrainingBudget:
        """Return this budget with the account of a restored checkpoint.

        data: from its record. If it is not valid, the account begins anew, as if all steps so far had had the present
        learning rate. step: of the checkpoint. rate: the learning rate now.
        """
        try:
            learned, before, highest = (_not_negative(data[key]) for key in ("learned", "rate", "highest"))
            restores = tuple(Restore(_not_negative(lost), _not_negative(at)) for lost, at in data["restores"])
        except (KeyError, OverflowError, TypeError, ValueError):
            learned, before, highest, restores = rate * step, rate, rate, ()
        return replace(self, learned=learned, rate=before, highest=highest, step=step, restores=restores)


def learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """Return the mean learning rate of all parameters; 0 without optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return mean_learning_rate(groups, [sum(parameter.numel() for parameter in group["params"]) for group in groups])


def mean_learning_rate(groups: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> float:
    """Return the mean learning rate of groups of parameters; 0 without groups. counts: the weights of the groups."""
    total = sum(_number(group) * count for group, count in zip(groups, counts, strict=True))
    return total / max(sum(counts), 1)


def _number(group: Mapping[str, Any]) -> float:
    rate = group.get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float | Tensor) else 0.0


def _left(restore: Restore, learned: float) -> float:
    """Return the share of a restore's degradation that has not healed yet."""
    if not 0 < restore.learned < learned:
        return 1.0 if restore.learned >= learned else 0.0
    return math.pow(restore.learned / learned, HEALING)


def _not_negative(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return float(value)
