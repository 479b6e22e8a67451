"""A rank of a sharded training is killed, hangs, or has a full disk: no commit is lost, and no other rank hangs.

The scenarios are in ``support/sharded_faults.py``. After each, the training goes on with another number of ranks.
"""

import json
import re
from pathlib import Path

import pytest
from launched import launch
from typer.testing import CliRunner

from dynaquant.cli import app

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_faults.py"

TIMEOUT = 500
"""Seconds. Much more than the scenarios of a test need."""
ADVICE = "The run keeps its last commit: start the training again, and restore() continues from there"


def launches_of(folder, scenarios):
    """Return by scenario what was reported of each launch."""
    status, output = launch(SCRIPT, 1, TIMEOUT, folder, *scenarios)
    assert status == 0, output
    found = json.loads(output.splitlines()[-1])
    for number, name in enumerate(scenarios):
        assert not any(launch["late"] for launch in found[name]), name
        verified = CliRunner().invoke(app, ["verify", str(folder / f"run-{number}")])
        assert verified.exit_code == 0, verified.output
    return found


def told(launch, word):
    """Return what ranks have reported that begins with a word, by rank."""
    reports = enumerate(launch["reports"])
    return {rank: found for rank, each in reports if (found := [rest for first, *rest in each if first == word])}


def survivors(launch):
    return [rank for rank in range(len(launch["reports"])) if rank not in launch["killed"]]


def goes_on(launch, step, saves=2, skipped=()):
    """Whether all ranks have restored the step, bit for bit, and saved twice. The next writer deletes what was left."""
    restored = told(launch, "restored")
    assert len(restored) == len(launch["reports"])
    assert all(found == [[step, list(skipped), []]] for found in restored.values()), restored
    assert all(found == [[True]] for found in told(launch, "as stored").values())
    assert all(found == [[step + n + 1] for n in range(saves)] for found in told(launch, "saved").values())
    assert launch["damaged"] == []
    assert launch["steps"][-saves:] == [step + n + 1 for n in range(saves)]
    return True


def stopped(launch, step):
    """Whether all ranks that were not killed have got an error that says what to do, at the save of a step."""
    failed = told(launch, "failed")
    assert list(failed) == survivors(launch)
    assert launch["damaged"] == []
    assert all(found[0][0] == step and found[0][1].startswith("DynaquantError: ") for found in failed.values())
    assert all(ADVICE in found[0][1] for found in failed.values()), failed
    return list(told(launch, "closed")) == survivors(launch)


def test_a_rank_that_is_killed_during_a_save_leaves_the_last_commit(tmp_path):
    last = {
        "save: begins": 1,
        "save: writes": 1,
        "save: rank 0 writes": 1,
        "save: has written": 1,
        "save: before the commit": 1,
        "save: after the commit": 2,
    }
    for name, (killed, resumed) in launches_of(tmp_path, last).items():
        assert len(killed["killed"]) == 1, name
        assert stopped(killed, 2), name
        assert killed["steps"] == list(range(1, last[name] + 1)), name
        assert goes_on(resumed, last[name]), name


def test_a_rank_that_is_killed_during_retention_leaves_every_checkpoint_that_is_kept(tmp_path):
    left = {
        "retention: re-codes": [2, 3, 4],
        "retention: re-codes its second part": [2, 3, 4],
        "retention: has re-coded": [2, 3, 4],
        "retention: deletes": [3, 4],
        "retention: waits for retention": [2, 3],
    }
    for name, (killed, resumed) in launches_of(tmp_path, left).items():
        assert len(killed["killed"]) == 1, name
        assert stopped(killed, 4), name
        assert killed["steps"] == left[name], name
        assert goes_on(resumed, left[name][-1]), name
        assert len(resumed["steps"]) == 2, name  # those of Keep(last=2)


def test_a_rank_that_is_killed_during_a_restore_leaves_the_run_and_the_other_ranks_as_they_were(tmp_path):
    scenarios = ["restore: rank 0 chooses", "restore: reads", "restore: has read", "restore: fills"]
    for name, (_, killed, resumed) in launches_of(tmp_path, scenarios).items():
        assert len(killed["killed"]) == 1, name
        assert stopped(killed, 0), name
        # Once a checkpoint fits on all ranks, they load it, and cannot know that one of them does not.
        unchanged = name != "restore: fills"
        assert all(found[0][2] == unchanged for found in told(killed, "failed").values()), name
        assert goes_on(resumed, 2), name


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_next_save_works(tmp_path):
    faulty, resumed = launches_of(tmp_path, ["full disk"])["full disk"]
    failed = told(faulty, "failed")
    path = "/parts/"
    assert failed[1][0][1].startswith("OSError: [Errno 27] File too large: ")
    for rank in (0, 2):
        assert failed[rank][0][1].startswith("DynaquantError: rank 1 failed: OSError: [Errno 27] File too large: ")
        assert "choose a path on another disk" in failed[rank][0][1]
    assert all(path in found[0][1] and found[0][0] == 2 for found in failed.values())
    assert faulty["steps"] == [1, 3]
    assert goes_on(resumed, 3)


def test_a_rank_that_hangs_while_it_writes_is_an_error_on_the_others_after_the_timeout_of_the_process_group(tmp_path):
    hanging, resumed = launches_of(tmp_path, ["hang"])["hang"]
    assert hanging["killed"] == [1]  # the others had ended before
    assert told(hanging, "hangs") == {1: [[]]}
    assert stopped(hanging, 2)
    assert hanging["steps"] == [1]
    assert goes_on(resumed, 1)


def test_if_evaluate_fails_on_one_rank_all_ranks_agree_and_the_training_is_unchanged(tmp_path):
    scenarios = [f"evaluate: {name}" for name in ("raises at 1", "raises at 2", "nan at 1", "nan at 2", "slow at 2")]
    for name, (evaluated, resumed) in launches_of(tmp_path, scenarios).items():
        first, second = told(evaluated, "failed" if "raises" in name else "saved").values()
        assert first == second, name
        if "raises" in name:
            assert first == [
                [2, "EvaluateError: evaluate failed, so nothing was saved; rank 1: ArithmeticError: no score"]
            ]
        assert told(evaluated, "unchanged") == {0: [[True]] * 2, 1: [[True]] * 2}, name
        assert told(evaluated, "undisturbed") == {0: [[True]], 1: [[True]]}, name
        assert evaluated["steps"] == ([1, 3] if "raises" in name else [1, 2, 3]), name
        assert goes_on(resumed, 3), name


def test_if_evaluate_leaves_the_other_ranks_waiting_they_get_an_error_after_the_timeout(tmp_path):
    deserted, resumed = launches_of(tmp_path, ["deserts"])["deserts"]
    assert stopped(deserted, 2)
    assert told(deserted, "failed")[1][0][1].startswith("DynaquantError: rank 1 failed: ArithmeticError: no score; ")
    assert all(found == [[True]] for found in told(deserted, "unchanged").values())
    assert goes_on(resumed, 1)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_checkpoint_with_a_damaged_part_is_skipped_on_all_ranks_and_named_if_asked_for(tmp_path, how):
    name = f"part: {how}"
    _, _, asked, resumed = launches_of(tmp_path, [name])[name]
    assert len(asked["damaged"]) == 1
    (reason, other), (failed, also) = told(asked, "restored").values(), told(asked, "failed").values()
    assert reason == other
    assert failed == also
    ((step, (skipped,)),) = reason
    assert step == 1
    assert re.search(r"parts/[0-9a-f]{32}\.dqc|its part [0-9a-f]{32}\.dqc", skipped)
    assert failed == [[2, f"CheckpointError: {skipped}"]]
    assert goes_on(resumed, 1, skipped=[skipped])
