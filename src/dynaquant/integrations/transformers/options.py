"""What the argument ``dynaquant`` of ``Trainer`` may hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict, cast

from dynaquant.engine.bound import Bound
from dynaquant.integrations.shared import check_exact
from dynaquant.options import Deprecated, Keep, Quality, QualityName, split_values
from dynaquant.saving.arguments import check_metric
from dynaquant.saving.log_to import LogTo, logger_of
from dynaquant.search.evaluation import Evaluate


class Options(TypedDict, total=False):
    """Arguments of ``Checkpointer`` and its ``restore``, as a dictionary; all may be left out.

    ``evaluate`` is by default the loss on the first batches of the evaluation set. A name means what
    ``trainer.evaluate()`` returns under it, such as ``metric_for_best_model``, and ``higher_is_better`` is then as
    Transformers has it. None: no metric. ``exact`` is by default ``"best"``: the weights of the best checkpoint are
    kept exactly, so that ``load_best_model_at_end`` returns what was evaluated. ``strict`` and ``only`` are arguments
    of ``Checkpointer.restore``.

    What is missing here follows from ``TrainingArguments``: the folder is ``dynaquant`` in ``output_dir``,
    ``save_strategy`` and ``save_steps`` say when to save, ``save_total_limit`` how many checkpoints to keep (the
    ``last`` of ``keep``).
    """

    quality: QualityName | Quality
    evaluate: Evaluate | str | None
    evaluate_average: Mapping[str, Evaluate] | None
    higher_is_better: bool
    exact: Literal["best"] | None
    roles: Mapping[str, str | Bound] | None
    extras: Mapping[str, Any] | None
    keep: Keep | None
    log_to: LogTo | None
    strict: bool
    only: str | Collection[str] | None


OF_RESTORE = ("strict", "only")
"""Options for ``Checkpointer.restore``, where a training is resumed."""


_TAKES = frozenset(Deprecated.__annotations__) - {"keep_last", "max_overhead", "mean_time_between_failures"}


def checked(options: Options | None) -> Options:
    """Return the options, with ``quality`` and ``keep`` as values.

    Raises TypeError unless they are a dictionary of known ones, ValueError or TypeError for bad values.
    """
    if not isinstance(options, Mapping | None):
        raise TypeError(f"dynaquant must be a dictionary of options, e.g. {{'quality': 'high'}}, not {options!r}")
    given: dict[str, Any] = dict(options or {})
    known = Options.__annotations__
    if unknown := sorted(set(given) - {*known, *_TAKES}):
        raise TypeError(f"dynaquant has no option {unknown[0]!r}; the options are {', '.join(known)}")
    exact = {} if given.get("exact", "latest") == "latest" else {"exact": given.pop("exact")}
    check_exact(exact.get("exact"))
    (quality, _, keep), others = split_values("dynaquant", given, _TAKES)
    metric = others.get("evaluate", "")
    check_metric(max if isinstance(metric, str) else metric, quality, keep)  # max: what a name or the default becomes
    if (log_to := others.get("log_to")) is not None:
        logger_of(log_to)
    return cast(Options, {**others, **exact, "quality": quality, "keep": keep})
