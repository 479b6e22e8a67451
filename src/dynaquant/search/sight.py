"""Tells whether a metric sees the weights that it is given, from its score of a model whose weights are all zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dynaquant.search.evaluation import degradation
from dynaquant.search.scores import MeasuredQuality

Sight = Literal["sees", "blind", "upside down"]
"""What a metric tells of weights.

- ``sees``: destroyed weights are worse than those in training, or hardly better.
- ``blind``: they score exactly the same. ``evaluate`` scores another model, or it does not tell any weights apart yet.
- ``upside down``: they are much better. ``higher_is_better`` is wrong, or the training has only begun.
"""

MUCH_BETTER = 0.4
"""All weights zero must be better by more than this share of the larger of both scores to be suspicious. A model that
has only begun to train may be a little worse than one that answers the same to everything."""
MUCH_WORSE = 0.2
"""A training worsens its metric by more than this share if it overfits, or if the metric is the wrong way round."""


def is_suspicious(degradations: Sequence[float | None], limit: float, before: Sight) -> bool:
    """Return whether the degradations of a search's candidates are reason enough to score destroyed weights.

    The metric was found to be upside down ``before``. Or no candidate was worse than the weights in training, and one
    of these holds: all were exactly the same; one was better by more than ``limit``; there were several, so the search
    went on to coarser ones; the metric was found to be blind before.
    """
    if before == "upside down":
        return True
    known = [degradation for degradation in degradations if degradation is not None]
    if not known or not all(degradation <= 0 for degradation in known):
        return False
    return before == "blind" or len(known) > 1 or known[0] == 0 or known[0] < -max(limit, 0.0)


def has_worsened(earlier: float, now: float, higher_is_better: bool) -> bool:
    """Return whether training has made the metric so much worse that destroyed weights should be scored once."""
    return degradation(earlier, now, higher_is_better) > MUCH_WORSE


def sight_of(zeros: Sequence[MeasuredQuality | None]) -> Sight:
    """Return what a metric tells of weights. Of several replicas, one that sees is enough.

    zeros: the quality of a model whose weights are all zero, by replica; None if the metric failed. To a score of 0 in
    training, nothing can be compared.
    """
    known = [quality for quality in zeros if quality is not None and quality.degradation <= 0]  # not if it is NaN
    if len(known) < len(zeros):
        return "sees"
    if all(quality.original == 0 or quality.degradation == 0 for quality in known):
        return "blind"
    return "upside down" if all(_much_better(quality) for quality in known) else "sees"


def _much_better(zeros: MeasuredQuality) -> bool:
    return abs(zeros.restored - zeros.original) > MUCH_BETTER * max(abs(zeros.restored), abs(zeros.original))


def note_on(sight: Sight, original: float, zeros: float, higher_is_better: bool, early: bool) -> str:
    """Return what is wrong with a metric that does not see, and what to do.

    zeros: its score of all weights zero. early: whether the training may not have learned anything yet.
    """
    if sight == "blind":
        said = (
            f"evaluate does not tell weights apart: it gives {original:.6g} for the weights in training, and also if "
            "all weights are zero. Let it score the model that it is given, not another one that it holds (a copy, a "
            "traced or captured model, an average of weights), and not only frozen parts"
        )
    else:
        better = "lower" if higher_is_better else "higher"
        advice = "leave out higher_is_better" if higher_is_better else "give higher_is_better=True"
        said = (
            f"evaluate prefers a model whose weights are all zero: {zeros:.6g} instead of {original:.6g} for the "
            f"weights in training. If a {better} number is better, {advice}; otherwise the model has overfitted"
        )
    if early or sight == "blind":
        said += ". It may also be too early in the training for this metric"
    return f"{said}. Meanwhile an estimate from how far the weights move decides, so that they are not destroyed"
