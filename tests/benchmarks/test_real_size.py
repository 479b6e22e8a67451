"""The benchmark of a training at real size: kills, exact continuation, the page. Here with a tiny model."""

from functools import partial

import numpy as np
import pytest
import torch
from real_size_page import numbers, page, plot, tables, worse
from real_size_runs import ANOTHER, DEFAULT, FINE, UNDISTURBED, Restore, Run, Sweep, plan_of
from real_size_training import Training, tokens_of
from results import publish


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a text of random words."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    words = ["".join(map(chr, draw.integers(97, 123, draw.integers(2, 6)))) for _ in range(200)]
    (folder / "shakespeare.txt").write_text(" ".join(draw.choice(words, 8_000)))
    return folder


@pytest.mark.slow
def test_after_kills_only_the_precision_of_checkpoints_differs(data, tmp_path):
    sweep = Sweep(plan_of(data, 0, quick=True), tmp_path, lambda _: None)
    alone, exact, killed = (sweep.run(name) for name in (UNDISTURBED, "lossless", DEFAULT))
    assert exact.losses == alone.losses
    assert exact.final == alone.final != killed.final
    assert [one.until for one in killed.restores] == sweep.plan.kills_of(DEFAULT)
    assert all(one.repeated > 0 for one in killed.restores)
    saved = list(range(4, 25, 4))
    assert [one["step"] for one in killed.records] == saved == [line["save"] for line in alone.of("save")]
    assert killed.stored < exact.stored < alone.stored
    assert alone.loaded["loaded"] > 0
    assert sweep.run(DEFAULT) == killed  # kept


@pytest.mark.slow
def test_a_training_that_fails_by_itself_is_an_error(data, tmp_path):
    sweep = Sweep(plan_of(data / "nowhere", 0, quick=True), tmp_path, lambda _: None)
    with pytest.raises(RuntimeError, match=r"shakespeare\.txt not found"):
        sweep.run(UNDISTURBED)


def test_the_text_becomes_tokens_once(data, tmp_path):
    training = Training(str(data), 10, vocabulary=300)
    train, held_out = tokens_of(training, tmp_path)
    assert train.max() < 300
    assert len(train) > 5 * len(held_out) > 0
    again = tokens_of(training, tmp_path)
    assert torch.equal(train, again[0])
    assert len(list(tmp_path.iterdir())) == 1


def test_the_rate_rises_and_falls():
    rates = [Training("", 100).rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0)


def test_no_kill_comes_at_a_save(data):
    plan = plan_of(data, 800, quick=False)
    kills = plan.kills_of(DEFAULT)
    assert len(kills) == 3
    assert all(0 < kill < 800 and kill % plan.training.every for kill in kills)
    assert plan.kills_of(FINE) == kills
    assert plan.kills_of(UNDISTURBED) == plan.kills_of(ANOTHER) == []


def step(number, loss):
    return {"step": number, "loss": loss, "seconds": 1.5, "cpu": 1.0, "peak": 7e8}


def save(number, size):
    return {"save": number, "blocked": 2.0, "blocked_cpu": 1.0, "disk": 3.0, "cpu": 2.5, "bytes": size, "peak": 9e8}


def record(number, size):
    searched = {"limit": 0.01, "degradation": 0.002, "equivalents": 2.5, "configuration": {"scale": -230}}
    return {"step": number, "parent": None, "raw": 4e8, "stored": size, **searched}


@pytest.fixture
def found():
    """Two runs of four steps, with a save every two; the second one was killed after the third step."""
    alone = [step(1, 4.0), step(2, 3.0), save(2, 4e8), step(3, 2.5), step(4, 2.0), save(4, 4e8)]
    end = {"final": 2.0, "records": [], "weights": 32_000_000}
    before = [{"restored": 0, "seconds": 0.0, "cpu": 0.0, "peak": 1e8}, *alone[:2], save(2, 2e7), step(3, 2.5)]
    after = [{"restored": 2, "seconds": 0.5, "cpu": 0.4, "peak": 8e8}, step(3, 2.6), step(4, 2.2), save(4, 2e7)]
    records = {"records": [record(2, 2e7), record(4, 2e7)]}
    return {
        UNDISTURBED: Run([[*alone, end]], {"loaded": 0.3, "cpu": 0.2}),
        DEFAULT: Run([before, [*after, {**end, "final": 2.01, **records}]]),
    }


def test_a_repeated_step_counts_as_it_was_the_last_time(found):
    killed = found[DEFAULT]
    assert killed.losses == [4.0, 3.0, 2.6, 2.2]
    assert killed.restores == [Restore(until=3, step=2, seconds=0.5, cpu=0.4)]
    assert killed.restores[0].repeated == 1
    assert killed.means(2) == pytest.approx([3.5, 2.4])


def test_a_restore_reads_all_files_from_the_keyframe_on():
    deltas = [record(4, 1e7) | {"parent": 2}, record(6, 1e7) | {"parent": 4}]
    run = Run([[{"final": 2.0, "records": [record(2, 2e7), *deltas]}]])
    assert [run.files_of(step) for step in (0, 2, 4, 6)] == [0, 1, 2, 3]


def test_the_page_shows_what_was_measured(found, data, tmp_path):
    ends, saves, steps, restores, over_time = tables(found)
    assert worse(found, DEFAULT) == pytest.approx(0.005)
    assert ends.rows[1] == ["`balanced`", "1", "1", "2.0100", "+0.50%", "2", "40 MB", "20.0×"]
    assert saves.rows[0][1:] == ["2.00 s", "1.00 s", "3.00 s", "2.50 s", "400.00 MB"]
    assert steps.rows[1][1:] == ["1.50 s", "1.00 s", "35% of the time", "700 MB", "900 MB", "800 MB"]
    assert restores.rows[0][1:] == ["3", "2", "1", "1", "0.50 s", "0.40 s"]
    assert over_time.rows[-1][2:] == ["20.00 MB", "20.0×", "1.00%", "+0.200%", "2.5", "-230"]
    plan = plan_of(data, 800, quick=False)
    described = {"cpu": "processor", "cores": 2, "torch": "2.0"}
    publish(tmp_path, "real_size", numbers(found, plan), partial(plot, found, plan), page(found, plan, described))
    text = (tmp_path / "real_size.md").read_text()
    assert "After 1 kills, which cost 1 steps, it ends +0.50% worse than the undisturbed run." in text
    assert "Its first 2 losses are the same bit for bit." in text
    assert "(undisturbed 1.50, `balanced` 1.50 times as long, median)" in text
    assert (tmp_path / "real_size.png").stat().st_size > 0
