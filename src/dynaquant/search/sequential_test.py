"""Tells from a few batches whether a candidate is good enough: a sequential test of paired differences.

Two sets of weights scored on the same batches differ far less by chance than their scores do. So the differences on a
few batches usually tell whether the mean difference over all batches is above a threshold. The batches are a sample
without replacement from a finite population, which shrinks the standard error by ``sqrt(1 - m / n)`` (Cochran, Sampling
Techniques, 1977, section 2.6).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Literal

FIRST_LOOK = 3
"""Batches of a candidate before its differences are tested for the first time."""
GROWTH = 1.5
"""Ratio of the numbers of batches at which a candidate is tested."""
ERROR_RATE = 0.05
"""Probability, at each look, that a candidate that is just good enough is called not good enough, if differences are
normally distributed. What that adds up to: docs/decisions.md, "How many batches does a candidate need?"."""
ERROR_RATE_OF_MORE = 0.3
"""The same once a candidate is known to be good enough: then an error costs only some size."""

Verdict = Literal["undecided", "above", "below"]


def order_of(batches: int, seed: int) -> list[int]:
    """Return the indices of all batches in the random order in which the candidates of one save are evaluated."""
    order = list(range(batches))
    random.Random(seed).shuffle(order)
    return order


def looks(batches: int) -> list[int]:
    """Return the numbers of batches after which a candidate is tested, the last one being all of them."""
    found: list[int] = []
    at = FIRST_LOOK
    while at < batches:
        found.append(at)
        at = max(at + 1, round(GROWTH * at))
    return [*found, batches]


def verdict(
    differences: Sequence[float], batches: int, lower: float, upper: float, error_rate: float = ERROR_RATE
) -> Verdict:
    """Return whether the mean difference over all batches is ``above`` ``upper``, or ``below`` ``lower``.

    differences: on a random sample of the batches, without replacement. batches: the number of all. A difference that
    is not finite decides: the mean is not finite either. error_rate: at this look, for each of the two.
    """
    if not all(map(math.isfinite, differences)):
        return "above"
    count = len(differences)
    center = math.fsum(differences) / count
    if count == batches:
        return "above" if center > upper else "below" if center < lower else "undecided"
    error = statistics.stdev(differences) / math.sqrt(count) * math.sqrt(1 - count / batches)
    margin = t_quantile(1 - error_rate, count - 1) * error
    return "above" if center - margin > upper else "below" if center + margin < lower else "undecided"


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, within 3 % for two degrees of freedom or more.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
