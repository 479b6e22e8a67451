"""The options of a training's checkpoints, as values: ``Quality``, ``Auto``, ``Moved``, ``Keep``.

Each value checks itself. ``options_of`` also takes the deprecated flat names of options, such as ``keep_last``.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from dynaquant.engine.quantize.knobs import GridConfiguration, Knobs, MethodName

QualityName = Literal["lossless", "high", "balanced", "small"]
"""How much quality may be lost: nothing; 0.05 %, 0.5 % or 2.5 % by a whole training, and twice that by a checkpoint."""
KEYFRAME_EVERY = 16
"""By default, the largest number of checkpoints in a chain of a training."""


@dataclass(frozen=True)
class Quality:
    """How much quality checkpoints may lose, and by which method. ``quality="high"`` means ``Quality("high")``.

    - ``preset``: ``"high"``, ``"balanced"`` and ``"small"`` mean a ``training_budget`` of 0.0005, 0.005 and 0.025, a
      ``max_degradation`` of 0.001, 0.01 and 0.05, and a matching precision of the optimizer's moments. ``"lossless"``
      stores every tensor exactly.
    - ``max_degradation``: how much worse the metric may be with the stored weights than with the weights in training,
      as a fraction: 0.01 is 1 %. If it is given alone, every checkpoint may use it, and there is no budget.
    - ``training_budget``: how much worse the metric may be at the end of the training by all restores together, as
      predicted. Checkpoints late in a schedule, and after many restores, may lose less than ``max_degradation``. Errors
      count as healing only where the learning rate tells how fast; elsewhere restores add up. With
      ``method="published"`` there is a budget only if it is given.
    - ``expected_restores``: how often the training will be restored in all, if you know: its length divided by the mean
      time between failures. The budget is divided by it. By default, each restore may use a quarter of what is left.
    - ``method``: how weights are quantized. ``"grid"``, the default, uses uniform grids. ``"published"`` is the system
      of the paper; it stores moments exactly.
    - ``configuration``: a fixed configuration of the quantizer, which decides the method. There is no search then; a
      metric is only recorded.
    - ``correct_moments``: whether the first steps after a restore correct first moments that the checkpoint does not
      hold, so that updates are not too short. ``close`` ends that. Moments that the checkpoint holds are left alone.

    Raises ValueError for an unknown name, and for options that are out of range or exclude each other; TypeError if
    ``configuration`` is not a configuration.
    """

    preset: QualityName = "balanced"
    _: KW_ONLY
    max_degradation: float | None = None
    training_budget: float | None = None
    expected_restores: int | None = None
    method: MethodName | None = None
    configuration: Knobs | None = None
    correct_moments: bool = True

    def __post_init__(self) -> None:
        if self.preset not in (names := get_args(QualityName)):
            raise ValueError(f"quality must be one of {', '.join(names)} or a dq.Quality(…), not {self.preset!r}")
        if not isinstance(self.configuration, Knobs | None):
            raise TypeError(f"configuration must be a Configuration or a GridConfiguration, not {self.configuration!r}")
        if self.configuration is not None and self.max_degradation is not None:
            raise ValueError(
                "configuration and max_degradation exclude each other: with a given configuration there is no search; "
                "leave out one of them"
            )
        if self.max_degradation is not None:
            check_share("max_degradation", self.max_degradation, 0.01)
        if self.training_budget is not None:
            check_share("training_budget", self.training_budget, 0.005, zero=False)
            if self.configuration is not None or self.preset == "lossless":
                raise ValueError(
                    "training_budget has no effect without a search: leave it out, or leave out the others"
                )
        if self.preset == "lossless" and (self.max_degradation, self.configuration, self.method) != (None, None, None):
            raise ValueError("quality='lossless' takes no max_degradation, method or configuration")
        if self.method is not None and self.method not in get_args(MethodName):
            raise ValueError(f"method must be {' or '.join(map(repr, get_args(MethodName)))}, not {self.method!r}")
        if self.method not in (None, self.chosen_method):
            raise ValueError(
                f"a {type(self.configuration).__name__} cannot be used with method {self.method!r}; "
                f"leave out method, or use {self.chosen_method!r}"
            )
        if self.expected_restores is not None:
            _check_count("expected_restores", self.expected_restores)
            if not self.has_budget:
                raise ValueError(
                    "expected_restores divides the budget of the training, and there is none: give training_budget, too"
                )
        _check_switch("correct_moments", self.correct_moments)

    @property
    def chosen_method(self) -> MethodName:
        """The method of the given configuration, else the given method, else ``"grid"``."""
        if self.configuration is None:
            return self.method or "grid"
        return "grid" if isinstance(self.configuration, GridConfiguration) else "published"

    @property
    def has_budget(self) -> bool:
        """Whether the training has a budget: a given one, or that of the preset."""
        if self.training_budget is not None:
            return True
        alone = self.max_degradation is None and self.configuration is None
        return alone and self.preset != "lossless" and self.chosen_method == "grid"


@dataclass(frozen=True, kw_only=True)
class Auto:
    """A value of ``every``: the steps between checkpoints follow from the measured cost of a save.

    - ``max_overhead``: the largest share of the training time that saves may take; 0.005 if neither is given.
    - ``mean_time_between_failures``: in seconds. The interval is the one that loses the least time to saves and
      failures together (Young 1974, Daly 2006). If both are given, the longer interval counts.

    Raises ValueError if a number is not above 0, or the overhead is 1 or more.
    """

    max_overhead: float | None = None
    mean_time_between_failures: float | None = None

    def __post_init__(self) -> None:
        if self.max_overhead is not None:
            _check_above_zero("max_overhead", self.max_overhead, "0.005 for half a percent of the time")
            if self.max_overhead >= 1:
                raise ValueError(f"max_overhead must be below 1, not {self.max_overhead!r}; for 2 percent, give 0.02")
        if self.mean_time_between_failures is not None:
            _check_above_zero("mean_time_between_failures", self.mean_time_between_failures, "3600 for an hour")


@dataclass(frozen=True)
class Moved:
    """A value of ``every``: a checkpoint is due once the weights have moved this far since the last one.

    distance: relative, above 0. 0.02 is 2 % of the weights' size. The movement is ``√(Σ F·(w - w₀)² / Σ F·w²)`` over
    the weights w that train. w₀ is the weight at the last save or restore; before the first one, at the first call of
    ``due``. F is the mean squared gradient of the weight's tensor at that moment, as for the grid steps (method 2.1):
    from Adam's second moment, or from the recorded gradients. A tensor whose F is not known counts as much as the
    average tensor. Infinite and NaN values do not count.

    The sums run over a sample of about 16,384 values: 128 to 4,096 of each tensor, evenly spaced. ``due`` reads it
    only at some of the steps: about half way through the last interval, then ever closer to the step where the
    movement should reach the distance. It notices that within about 2 % of the interval; later if the weights suddenly
    move faster than before. Of several ranks, each has such a sample of what it holds, and they add up their sums.

    Raises ValueError if the distance is not a number above 0.
    """

    distance: float

    def __post_init__(self) -> None:
        if not _is_number(self.distance) or not 0 < self.distance < math.inf:
            raise ValueError(f"Moved needs a finite distance above 0, e.g. Moved(0.02) for 2 %, not {self.distance!r}")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints of a run to keep, and how. Without ``last``, ``every`` and ``best``, all are kept.

    - ``last``: how many of the newest checkpoints to keep. Without it, the newest is kept.
    - ``every``: checkpoints whose step is a multiple of this are kept as well.
    - ``best``: how many checkpoints with the best metric, as their restored weights have it, are kept as well. Needs
      ``evaluate``.
    - ``lossless_copy``: whether to keep a lossless copy of the newest checkpoint, too. ``restore`` prefers it. Not for
      a sharded model.
    - ``keyframe_every``: the largest number of checkpoints in a chain, including its keyframe.

    Checkpoints with a tag are always kept. Raises ValueError for numbers below 1.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    lossless_copy: bool = False
    keyframe_every: int = KEYFRAME_EVERY

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            if (value := getattr(self, name)) is not None:
                _check_count(f"Keep({name}=…)", value)
        _check_switch("lossless_copy", self.lossless_copy)
        _check_count("Keep(keyframe_every=…)", self.keyframe_every)

    @property
    def keeps_all(self) -> bool:
        """Whether no checkpoint is ever deleted."""
        return (self.last, self.every, self.best) == (None, None, None)


Every = int | Auto | Moved
"""When a checkpoint is due: after a number of steps, as often as its cost allows, or as far as the weights move."""


def quality_of(quality: QualityName | Quality) -> Quality:
    """Return the value that the name of a preset means, and a value as it is."""
    return quality if isinstance(quality, Quality) else Quality(quality)


# Checks of single numbers.


def check_share(name: str, value: Any, example: float, zero: bool = True) -> None:
    """Raise ValueError unless a value is a number from 0 up to, but not including, 1. zero: whether 0 is allowed.

    name, example: of the option, for the message. Whoever gives 1 or more means a percentage: with 100 % of the
    metric to lose, nothing of the model needs to be left.
    """
    if not _is_number(value) or not 0 <= value < math.inf or (value == 0 and not zero):
        least = "of at least 0" if zero else "above 0"
        kind = ", which is text" if isinstance(value, str | bytes) else ""
        raise ValueError(f"{name} must be a finite number {least}, e.g. {example}, not {value!r}{kind}")
    if value >= 1:
        raise ValueError(
            f"{name} is a fraction of the metric, and {value:g} means {100 * value:g} %; "
            f"for {value:g} % give {value / 100:g}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_above_zero(name: str, value: Any, example: str) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, e.g. {example}, not {value!r}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


# The values of a call, also from deprecated names.


class Deprecated(TypedDict, total=False):
    """The flat names that options had before, and that are deprecated: fields of ``Quality``, ``Auto`` and ``Keep``.

    ``keep_last``, ``keep_every`` and ``keep_best`` are ``last``, ``every`` and ``best`` of ``Keep``;
    ``exact="latest"`` is its ``lossless_copy=True``. ``every="auto"`` is ``every=Auto()``.
    """

    max_degradation: float | None
    training_budget: float | None
    expected_restores: int | None
    method: MethodName | None
    configuration: Knobs | None
    correct_moments: bool
    max_overhead: float | None
    mean_time_between_failures: float | None
    keep_last: int | None
    keep_every: int | None
    keep_best: int | None
    exact: Literal["latest"] | None
    keyframe_every: int


class Values(NamedTuple):
    """The values of a call."""

    quality: Quality
    every: Every | None
    keep: Keep


_PLACES: dict[str, tuple[str, str]] = {
    **{field.name: ("quality", field.name) for field in fields(Quality)[1:]},
    **{field.name: ("every", field.name) for field in fields(Auto)},
    **{f"keep_{name}": ("keep", name) for name in ("last", "every", "best")},
    "exact": ("keep", "lossless_copy"),
    "keyframe_every": ("keep", "keyframe_every"),
}
"""The option and the field that replace each deprecated name."""


def options_of(
    function: str,
    deprecated: Mapping[str, Any],
    quality: QualityName | Quality = "balanced",
    every: Every | None = None,
    keep: Keep | None = None,
    takes: Collection[str] = tuple(_PLACES),
    also: Collection[str] = (),
) -> Values:
    """Return the options of a call as values. Warns once if deprecated names are among them.

    function: the name of what is called, for messages. deprecated: options by their deprecated names. takes: the
    deprecated names that it takes; it takes the fields that replace these. also: other fields that it takes, which
    never had a name of their own.

    Raises TypeError for an unknown name or a wrong type; ValueError for what is given twice, is not taken or is wrong.
    """
    if unknown := next((name for name in deprecated if name not in takes), None):
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
    given: dict[str, Any] = {"quality": quality, "every": every, "keep": keep}
    flat = {**deprecated, **({"every": every} if isinstance(every, str) and every == "auto" else {})}
    advice = []
    for option, kind in (("quality", Quality), ("every", Auto), ("keep", Keep)):
        of_option = {name: value for name, value in flat.items() if _PLACES.get(name, (name, ""))[0] == option}
        if any(value is not None for value in of_option.values()):
            given[option], text = _value_for(option, kind, given[option], of_option)
            advice.append(text)
    if flat:
        names = ", ".join(f"{name}={value!r}" for name, value in flat.items())
        text = f"{names} {'is' if len(flat) == 1 else 'are'} deprecated: "
        text += f"give {', '.join(advice)}" if advice else "leave it out"
        warnings.warn(text, DeprecationWarning, stacklevel=_level_of_user())
    return _checked(function, {*takes, *also}, **given)


def split_values(
    function: str, options: Mapping[str, Any], takes: Collection[str] = tuple(_PLACES)
) -> tuple[Values, dict[str, Any]]:
    """Return the values among options, also from deprecated names (``options_of``), and the other options."""
    others = {name: value for name, value in options.items() if name not in _PLACES}
    deprecated = {name: value for name, value in options.items() if name in _PLACES}
    values = {name: others.pop(name) for name in Values._fields if name in others}
    return options_of(function, deprecated, takes=takes, **values), others


def _value_for(option: str, kind: type[Any], value: Any, flat: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the value that deprecated names mean together with ``value``, and how to write it."""
    if (exact := flat.get("exact")) not in ("latest", None):
        raise ValueError(
            f'exact must be "latest" or None, not {exact!r}; to store all checkpoints exactly, use quality="lossless"'
        )
    new = {_PLACES[name][1]: each for name, each in flat.items() if name in _PLACES and each is not None}
    new |= {"lossless_copy": True} if exact else {}
    preset = [getattr(value, "preset", value)] if kind is Quality else []
    fields = [repr(each) for each in preset if each != "balanced"] + [f"{name}={each!r}" for name, each in new.items()]
    text = f"{option}=dq.{kind.__name__}({', '.join(fields)})"
    if isinstance(value, kind) or (kind is Auto and "every" not in flat):
        beside = f"dq.{type(value).__name__}(…)" if isinstance(value, kind | Moved) else repr(value)
        raise ValueError(f"{', '.join(flat)} cannot be given beside {option}={beside}: write one value, e.g. {text}")
    return kind(*preset, **new), text


def _checked(function: str, takes: Collection[str], quality: Any, every: Any, keep: Any) -> Values:
    """Return the values. Raises TypeError or ValueError for what is none, and for fields that are not taken."""
    quality = quality_of(quality)
    is_count = hasattr(every, "__index__") and not isinstance(every, bool) and every >= 1
    if every is not None and not is_count and not isinstance(every, Auto | Moved):
        raise ValueError(f"every must be at least 1 (a number of steps), a dq.Auto(…) or a dq.Moved(…), not {every!r}")
    keep = Keep() if keep is None else keep
    if not isinstance(keep, Keep):
        raise TypeError(f"keep must be a dq.Keep(…), e.g. dq.Keep(last=3), not {keep!r}")
    for name, (option, field) in _PLACES.items():
        value = {"quality": quality, "keep": keep}.get(option)
        if name not in takes and value is not None and getattr(value, field) != getattr(type(value)(), field):
            raise ValueError(f"{function} takes no {field} in dq.{type(value).__name__}(…): leave it out")
    return Values(quality, every, keep)


def _level_of_user() -> int:
    """Return the ``stacklevel`` of a warning for the first caller of ``options_of`` outside of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "dynaquant":
        frame, level = frame.f_back, level + 1
    return level
