"""What the argument ``dynaquant`` of ``Trainer`` may hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict

from dynaquant.engine.bound import Bound
from dynaquant.engine.quantize.knobs import Knobs, MethodName
from dynaquant.saving.allowance import Allowance
from dynaquant.saving.arguments import check_options
from dynaquant.saving.log_to import LogTo, logger_of
from dynaquant.saving.presets import QualityName
from dynaquant.search.evaluation import Evaluate
from dynaquant.store.retention import KEYFRAME_EVERY, Retention


class Options(TypedDict, total=False):
    """Arguments of ``Checkpointer`` and its ``restore``, as a dictionary; all may be left out.

    ``evaluate`` is by default the loss on the first batches of the evaluation set. A name means what
    ``trainer.evaluate()`` returns under it, such as ``metric_for_best_model``, and ``higher_is_better`` is then as
    Transformers has it. None: no metric. ``exact`` is by default ``"best"``: the weights of the best checkpoint are
    kept exactly, so that ``load_best_model_at_end`` returns what was evaluated. ``strict`` and ``only`` are arguments
    of ``Checkpointer.restore``.

    What is missing here follows from ``TrainingArguments``: the folder is ``dynaquant`` in ``output_dir``,
    ``save_strategy`` and ``save_steps`` say when to save, ``save_total_limit`` how many checkpoints to keep.
    """

    quality: QualityName
    evaluate: Evaluate | str | None
    evaluate_average: Mapping[str, Evaluate] | None
    higher_is_better: bool
    max_degradation: float | None
    training_budget: float | None
    expected_restores: int | None
    method: MethodName | None
    configuration: Knobs | None
    exact: Literal["latest", "best"] | None
    correct_moments: bool
    roles: Mapping[str, str | Bound] | None
    extras: Mapping[str, Any] | None
    keep_every: int | None
    keep_best: int | None
    keyframe_every: int
    log_to: LogTo | None
    strict: bool
    only: str | Collection[str] | None


OF_RESTORE = ("strict", "only")
"""Options for ``Checkpointer.restore``, where a training is resumed."""


def checked(options: Options | None) -> Options:
    """Return the options. Raises TypeError unless they are a dictionary of known ones, ValueError for bad values."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"dynaquant must be a dictionary of options, e.g. {{'quality': 'high'}}, not {options!r}")
    if unknown := sorted(set(options) - set(Options.__annotations__)):
        raise TypeError(f"dynaquant has no option {unknown[0]!r}; the options are {', '.join(Options.__annotations__)}")
    _check_values(options)
    return options


def _check_values(options: Options) -> None:
    """Raise ValueError or TypeError for what a ``Checkpointer`` would refuse when the training begins."""
    quality = options.get("quality", "balanced")
    Allowance(
        quality,
        options.get("method"),
        options.get("max_degradation"),
        options.get("configuration"),
        options.get("training_budget"),
        options.get("expected_restores"),
    )
    metric = options.get("evaluate", "")
    exact, best = options.get("exact"), options.get("keep_best")
    check_options(
        max if isinstance(metric, str) else metric,  # stands for the function that a name or the default becomes
        quality,
        None if exact == "best" else exact,
        best,
        options.get("keyframe_every", KEYFRAME_EVERY),
    )
    Retention(None, options.get("keep_every"), best)
    if (log_to := options.get("log_to")) is not None:
        logger_of(log_to)
