"""The user's limits for a save: how much quality it may lose, and which method it uses."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, get_args

from dynaquant.engine.quantize.knobs import GridConfiguration, Knobs, MethodName
from dynaquant.methods.named import METHODS
from dynaquant.saving.presets import PRESETS, QualityName


@dataclass(frozen=True)
class Allowance:
    """How much quality a checkpoint may lose, and by which method. The fields are arguments of ``Checkpointer``.

    Raises ValueError for an unknown name, and for arguments that are out of range or exclude each other; TypeError if
    ``configuration`` is not a configuration.
    """

    quality: QualityName
    method: MethodName | None
    max_degradation: float | None
    configuration: Knobs | None
    training_budget: float | None = None
    expected_restores: int | None = None

    def __post_init__(self) -> None:
        if self.quality not in PRESETS:
            raise ValueError(f"quality must be one of {', '.join(PRESETS)}, not {self.quality!r}")
        if not isinstance(self.configuration, Knobs | None):
            raise TypeError(f"configuration must be a Configuration or a GridConfiguration, not {self.configuration!r}")
        if self.configuration is not None and self.max_degradation is not None:
            raise ValueError(
                "configuration and max_degradation exclude each other: with a given configuration there is no search; "
                "leave out one of them"
            )
        if self.max_degradation is not None:
            check_share("max_degradation", self.max_degradation, 0.01)
        budget = self.training_budget
        if budget is not None:
            check_share("training_budget", budget, 0.005, zero=False)
        if budget is not None and (self.configuration is not None or self.quality == "lossless"):
            raise ValueError("training_budget has no effect without a search: leave it out, or leave out the others")
        expected = self.expected_restores
        if expected is not None and (isinstance(expected, bool) or not isinstance(expected, Integral) or expected < 1):
            raise ValueError(f"expected_restores must be a whole number of at least 1, not {expected!r}")
        if expected is not None and self.budget_of_training is None:
            raise ValueError(
                "expected_restores divides the budget of the training, and there is none: give training_budget, too"
            )
        if self.quality == "lossless" and (self.max_degradation, self.configuration, self.method) != (None, None, None):
            raise ValueError("quality='lossless' takes no max_degradation, method or configuration")
        if self.method is not None and self.method not in get_args(MethodName):
            raise ValueError(f"method must be {' or '.join(map(repr, get_args(MethodName)))}, not {self.method!r}")
        if self.method not in (None, self.chosen_method):
            raise ValueError(
                f"a {type(self.configuration).__name__} cannot be used with method {self.method!r}; "
                f"leave out method, or use {self.chosen_method!r}"
            )

    @property
    def budget_of_training(self) -> float | None:
        """What the whole training may lose by restores; None if every checkpoint may use ``max_degradation``.

        That is so if ``max_degradation`` was given without ``training_budget``, and for the published method.
        """
        preset = PRESETS[self.quality]
        if self.training_budget is not None or preset is None or self.configuration is not None:
            return self.training_budget
        has_budget = METHODS[self.chosen_method].has_budget
        return preset.training_budget if self.max_degradation is None and has_budget else None

    @property
    def chosen_method(self) -> MethodName:
        """The method of the given configuration, else the given method, else ``"grid"``."""
        if self.configuration is None:
            return self.method or "grid"
        return "grid" if isinstance(self.configuration, GridConfiguration) else "published"


def check_share(name: str, value: Any, example: float, zero: bool = True) -> None:
    """Raise ValueError unless a value is a number from 0 up to, but not including, 1. zero: whether 0 is allowed.

    name, example: of the argument, for the message. Whoever gives 1 or more means a percentage: with 100 % of the
    metric to lose, nothing of the model needs to be left.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < inf or (value == 0 and not zero):
        least = "of at least 0" if zero else "above 0"
        kind = ", which is text" if isinstance(value, str | bytes) else ""
        raise ValueError(f"{name} must be a finite number {least}, e.g. {example}, not {value!r}{kind}")
    if value >= 1:
        raise ValueError(
            f"{name} is a fraction of the metric, and {value:g} means {100 * value:g} %; "
            f"for {value:g} % give {value / 100:g}"
        )
