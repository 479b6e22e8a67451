"""Lossless resumes on two ranks: see ``support/resuming_ranks.py``."""

from pathlib import Path

import pytest
from launched import findings_of
from resuming_ranks import SCENARIOS

SCRIPT = Path(__file__).parents[1] / "support" / "resuming_ranks.py"


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return findings_of(SCRIPT, tmp_path_factory.mktemp("resuming"))


@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith("loader")])
def test_a_lossless_resume_goes_on_bit_for_bit_in_every_layout(findings, name):
    assert findings[name] == [[], []]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_rank_goes_on_with_its_own_items(findings, workers):
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    first, second = findings[f"loader {workers}"]
    assert [len(each["before"]) for each in (first, second)] == [2, 3]
    for each in (first, second):
        assert each["resumed"] == each["undisturbed"] != []
    seen = [
        item for each in (first, second) for part in ("before", "resumed") for batch in each[part] for item in batch
    ]
    assert sorted(seen) == list(range(24))
