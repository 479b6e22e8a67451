"""Several ranks score candidates on batches together: one that evaluates nothing, or fails, leaves none waiting."""

import json
from pathlib import Path

import pytest
from launched import launch

SCRIPT = Path(__file__).parents[1] / "support" / "lockstep_replicas.py"
TIMEOUT = 120
"""Seconds. Much more than a launch needs, so a timeout means that a rank hangs."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """The report of each rank."""
    folder = tmp_path_factory.mktemp("lockstep")
    status, output = launch(SCRIPT, 2, TIMEOUT, folder)
    assert status == 0, output
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_rank_whose_candidate_keeps_too_little_waits_for_the_others(reports, skipping):
    outcomes = [report[f"rank {skipping} skips"] for report in reports]
    assert outcomes[0]["trials"] == outcomes[1]["trials"]
    skipped, evaluated = outcomes[0]["trials"][skipping], outcomes[0]["trials"][1 - skipping]
    assert skipped["progress"] < 0.95 < evaluated["progress"]
    assert (skipped["degradation"], skipped["share"]) == (None, 0)
    assert evaluated["degradation"] > 0
    assert evaluated["share"] == 1
    assert (outcomes[skipping]["calls"], outcomes[1 - skipping]["calls"]) == (0, 20)


def test_no_rank_evaluates_if_all_candidates_keep_too_little(reports):
    for report in reports:
        assert report["both skip"]["calls"] == 0
        assert [trial["degradation"] for trial in report["both skip"]["trials"]] == [None]


@pytest.mark.parametrize(("what", "says"), [("candidate", "for a candidate"), ("value", "for a value")])
def test_if_memory_runs_out_on_one_rank_before_its_first_batch_the_search_fails_on_all(reports, what, says):
    ended, own = (report[f"no {what}"] for report in reports)
    assert (own["error"], own["says"]) == ("MemoryError", f"no memory {says}")
    assert ended["error"] == "DynaquantError"
    assert ended["says"].startswith(f"rank 1 failed: MemoryError: no memory {says}")
    assert (own["calls"], ended["calls"]) == (0, 3)  # the other rank ends after its first step


def test_if_losses_returns_too_few_numbers_on_one_rank_all_ranks_say_so(reports):
    for report in reports:
        failure = report["too few numbers"]
        assert failure["error"] == "EvaluateError"
        assert "rank 1: ValueError: losses of evaluate returned 2 numbers for 3 batches" in failure["says"]
        assert "rank 0" not in failure["says"]


def test_collectives_of_the_ranks_still_pair_up(reports):
    for report in reports:
        assert all(outcome["in step"] for outcome in report.values())
