"""What a typical save costs, for an automatic schedule: the measured cost of the last searches."""

import pytest

from dynaquant.saving.saver import _typical_seconds
from dynaquant.search.decision import Decision

SECONDS = {"wait": 0.5, "capture": 0.25, "search": 8.0}


@pytest.mark.parametrize(("equivalents", "typical", "expected"), [(8.0, 2.0, 2.75), (2.0, 2.0, 8.75), (1.0, 2.0, 8.75)])
def test_a_search_that_costs_more_than_usual_counts_as_a_usual_one(equivalents, typical, expected):
    assert _typical_seconds(SECONDS, Decision("scale", None, equivalents=equivalents), typical) == expected


def test_a_search_without_a_metric_counts_as_it_is():
    assert _typical_seconds(SECONDS, Decision("scale", None), 2.0) == 8.75
