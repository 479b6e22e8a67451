"""The benchmark of the integrations: trainings that are killed and resumed, and the page."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="Accelerate is not installed")
pytest.importorskip("lightning", reason="Lightning is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from integrations import runs
from integrations.byte_model import OWN, VALIDATED, Ended
from integrations.page import each, lossless, lossy, page, saving_changes_nothing, tables_of_sizes
from integrations.runs import FRAMEWORKS, Attempt, Kill, Kind, Run, Sweep, plan_of, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a text of random letters."""
    folder = tmp_path_factory.mktemp("data")
    letters = np.random.default_rng(0).integers(97, 123, 20_000, dtype=np.uint8)
    (folder / "shakespeare.txt").write_bytes(letters.tobytes())
    return folder


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_killed_training_with_lossless_checkpoints_ends_as_the_frameworks_own(framework, data, tmp_path, monkeypatch):
    plan = plan_of(data, quick=True)
    monkeypatch.setattr(runs.Plan, "kills_of", lambda _, kind: [Kill(6, 0.0)] if kind.killed else [])
    told = []
    killed = trained(Kind(framework, "lossless", 0, killed=True), plan, tmp_path, told.append)
    first, second = killed.attempts
    assert (first.first, second.last) == (1, plan.training.steps)
    assert second.first % plan.training.every == 1
    assert told[-1] == plan.training.steps
    alone = trained(Kind(framework, OWN, 0), plan, tmp_path)
    assert alone.attempts == [Attempt(1, plan.training.steps)]
    assert (killed.ended.weights, killed.ended.history, killed.ended.final) == (
        alone.ended.weights,
        alone.ended.history,
        alone.ended.final,
    )
    assert 0 < killed.ended.last < alone.ended.last < alone.ended.total
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_fails_by_itself_is_an_error(data, tmp_path):
    plan = plan_of(data / "nowhere", quick=True)
    with pytest.raises(RuntimeError, match=r"nowhere/shakespeare\.txt"):
        trained(Kind("accelerate", OWN, 0), plan, tmp_path)


def test_kills_are_the_same_for_all_ways_to_save_and_come_after_the_first_save(data):
    plan = plan_of(data, quick=False)
    for seed in range(20):
        kills = plan.kills_of(Kind("lightning", "lossless", seed, killed=True))
        assert kills == plan.kills_of(Kind("lightning", "balanced", seed, killed=True))
        steps = [kill.step for kill in kills]
        assert steps == sorted(set(steps))
        assert len(steps) == plan.kills == 3
        assert plan.training.every < steps[0]
        assert steps[-1] < plan.training.steps
    assert plan.kills_of(Kind("lightning", "lossless", 0)) == []


def test_a_sweep_runs_what_its_folder_does_not_have(data, tmp_path, monkeypatch):
    monkeypatch.setattr(runs.Plan, "kinds", lambda _: iter([Kind("accelerate", OWN, 0)]))
    sweep = Sweep(plan_of(data, quick=True), tmp_path)
    sweep.run(workers=1)
    (run,) = sweep.found().values()
    assert run.ended.steps == 12
    monkeypatch.setattr(runs, "_keep", None)
    sweep.run(workers=1)
    assert list(sweep.found().values()) == [run]


def found(plan):
    """Return made-up runs: those of dynaquant are smaller, and killed ones end 0.01 worse, with VALIDATED 0.3."""

    def run(kind: Kind) -> Run:
        worse = {"balanced": 0.01, VALIDATED: 0.3}.get(kind.saving, 0.0) * kind.killed
        weights = f"{kind.framework} {kind.seed} {worse}"
        size = 1_000_000 if kind.saving == OWN else 10_000
        attempts = [Attempt(1, 30), Attempt(21, 240)] if kind.killed else [Attempt(1, 240)]
        ended = Ended(240, weights, [weights], 2.0 + 0.1 * kind.seed + worse, size, 12 * size, 12)
        return Run(ended, attempts)

    return {kind: run(kind) for kind in plan.kinds()}


def test_the_page_says_what_was_found(data):
    plan = plan_of(data, quick=False)
    runs_found = found(plan)
    last, mean = tables_of_sizes(runs_found)
    assert last.rows[0][1:] == ["1,000 kB"] * 3
    assert last.rows[-1][1:] == ["–", "–", "10 kB, 100.0×"]
    assert mean.rows[1][1:] == ["10 kB, 100.0×"] * 3
    assert [row[1:] for row in saving_changes_nothing(runs_found).rows] == [
        [str(n), *[f"{n} of {n}"] * 3] for n in (4, 4, 5)
    ]
    assert [row[1:] for row in lossless(runs_found).rows] == [["4", "4 of 4", "4 of 4", "4 of 4"]] * 3
    ends = lossy(runs_found).rows
    assert ends[0][1:] == ["4", "2.150", "+0.010 ± 0.000", "0.129", "yes", "4 of 4"]
    assert ends[3][3:6] == ["+0.300 ± 0.000", "0.129", "**no**"]
    assert ends[4][0] == 'Lightning, `"high"`'
    assert each(runs_found).rows[0] == ["Transformers, 0", "2.0000", "2.0100", "+0.0100", "30", "20"]
    text = page(runs_found, plan, {"cpu": "processor", "cores": 2, "torch": "2.0"})
    assert 'Worse by more than the seeds are apart: Lightning, `"balanced"`, `metric="val_loss"`.' in text


def test_the_page_marks_lossless_trainings_that_end_otherwise(data):
    plan = plan_of(data, quick=False)
    runs_found = found(plan)
    kind = Kind("accelerate", "lossless", 1, killed=True)
    runs_found[kind] = replace(runs_found[kind], ended=replace(runs_found[kind].ended, weights="others"))
    assert lossless(runs_found).rows[1][1:] == ["4", "**3 of 4**", "4 of 4", "4 of 4"]
