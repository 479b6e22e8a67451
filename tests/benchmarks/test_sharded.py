"""The benchmark of sharded training: kills, other numbers of ranks, the same changes by PyTorch, the page."""

import json
import random
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from sharding import trainings
from sharding.gpt import Training
from sharding.launching import launch, random_kills
from sharding.page import ends, goals, memory, page, plot, sizes
from sharding.sweep import BY_MMAP, RANKS, Ends, Found, plan_of
from sharding.trainings import Attempt, Trained, crashed, kept, replayed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a text of random letters."""
    folder = tmp_path_factory.mktemp("data")
    letters = np.random.default_rng(0).integers(97, 123, 20_000, dtype=np.uint8)
    (folder / "shakespeare.txt").write_bytes(letters.tobytes())
    return folder


def test_losses_after_a_kill_are_those_of_pytorchs_checkpoints_on_the_same_ranks(data, tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "LAYOUTS", (2, 1))
    training = Training(str(data), 0, 12, width=32, layers=1, final=16, search=1)
    ours = crashed(training, "lossless", every=2, crashes=1, scratch=tmp_path)
    assert [attempt.ranks for attempt in ours.attempts] == [2, 1]
    assert ours.attempts[1].until == len(ours.losses) == 12
    theirs = replayed(training, ours, tmp_path)
    assert theirs.counted() == ours.counted()
    assert (theirs.losses, theirs.final) == (ours.losses, ours.final)


def test_a_rank_measures_sizes_and_time(data, tmp_path):
    training = asdict(Training(str(data), 0, 12, width=32, layers=1, final=16, search=1))
    orders = {"training": training, "keep": (4, 6), "repeats": 1}
    launch(tmp_path, 1, {**orders, "action": "prepare"})
    orders["configuration"] = json.loads((tmp_path / "prepared.json").read_text())
    launch(tmp_path, 2, {**orders, "action": "measure"})
    found = json.loads((tmp_path / "measured-2.json").read_text())
    assert 0 < found["delta"] < found["keyframe"] < found["dcp_zstd"] < found["dcp"]
    assert found["cpu"] > 0


def test_ranks_that_fail_by_themselves_are_an_error(data, tmp_path):
    orders = {"action": "train", "training": asdict(Training(str(data / "nowhere"), 0, 2)), "quality": None}
    with pytest.raises(RuntimeError, match=r"shakespeare\.txt not found"):
        launch(tmp_path, 1, orders)


def test_every_kill_comes_after_another_checkpoint():
    for seed in range(20):
        kills = random_kills(440, 20, 10, [4, 2, 1] * 4, random.Random(seed))
        steps = [0, *(kill.step for kill in kills), 440]
        assert all(later // 20 > earlier // 20 for earlier, later in pairwise(steps))
        assert all(kill.rank < ranks for kill, ranks in zip(kills, [4, 2, 1] * 4, strict=False))
    with pytest.raises(ValueError, match="10 crashes in 100 steps"):
        random_kills(100, 20, 10, [4] * 10, random.Random(0))


def test_a_training_is_kept_and_its_attempts_count_until_the_next_one_begins(tmp_path):
    made = Trained(2.0, [3.0, 2.5, 2.0], [Attempt(4, 0, 2), Attempt(2, 1, 3)], 50.0)
    file = tmp_path / "kept.json"
    assert kept(file, lambda: made) == kept(file, lambda: None) == made
    assert made.counted() == [Attempt(4, 0, 1), Attempt(2, 1, 3)]


def test_the_page_says_what_was_reached(data, tmp_path):
    alone = Trained(2.0, [3.0, 2.5, 2.0], [Attempt(4, 0, 3)])
    killed = Trained(2.002, [3.0, 2.5, 2.1], [Attempt(4, 0, 2), Attempt(2, 1, 3), Attempt(1, 2, 3)], 50.0)
    numbers = {"raw": 7.5e7, "keyframe": 1e6, "delta": 5e5, "dcp": 4e7, "dcp_zstd": 3.5e7}
    numbers |= {"keyframe_cpu": 1.0, "cpu": 1.0, "dcp_cpu": 1.0, "dcp_zstd_cpu": 1.0}
    costly = {**numbers, "cpu": 2.0, "delta": 5.1e5}
    own = {"share": 1e8, "largest": 5e6, "keyframe": 3e7, "delta": 4.5e7, "kept": 2e7, "restore": 1.4e7}
    own |= {"keyframe_cpu": 1.0, "cpu": 1.0}
    of_ranks = {count: [own] * count for count in RANKS}
    found = Found(
        [Ends(alone, alone, killed)] * 2,
        killed,
        killed,
        {1: numbers, 2: numbers, 4: costly},
        {"balanced": of_ranks, BY_MMAP: of_ranks, "lossless": of_ranks},
    )
    assert [row[-1] for row in goals(found).rows] == ["yes", "yes", "yes", "**no**", "yes", "yes", "yes"]
    assert ends(found).rows[0][1:] == ["2.0000", "2.0000", "2", "2.0020", "+0.10%", "50.0×"]
    assert sizes(found).rows[1] == ["delta, kB", "500", "500", "510", "+2.0%"]
    assert memory(found).rows[0] == ["balanced, 1", "100", "45%", "20%", "14%", "9%"]
    plot(found, tmp_path / "sharded.png")
    text = page(found, plan_of(data, quick=True), {"cpu": "processor", "cores": 2, "torch": "2.0"})
    assert "+0.10% ± 0.00% worse" in text
