"""``tag``, ``steps`` and ``Keep(best=…)``: names for checkpoints, and which of them are kept."""

import math

import pytest
import torch
from torch import nn
from training import bits

import dynaquant as dq
from dynaquant.store.run import Run
from dynaquant.store.tags import tags_of

METRICS = {10: 5.0, 20: 1.0, 30: 3.0, 40: 2.0, 50: 4.0, 60: 6.0}
"""A metric by step, of which it is read; it does not depend on how weights are rounded."""


class Training:
    """A model that changes with every save, and a metric that is what METRICS says of the step."""

    def __init__(self, folder, **options) -> None:
        torch.manual_seed(0)
        self.model, self.step = nn.Linear(40, 40), 0
        self.ckpt = dq.Checkpointer(folder, self.model, evaluate=self.evaluate, **options)

    def evaluate(self, scored: nn.Module) -> float:
        return METRICS[self.step] if scored.weight.any() else math.nan  # all zero is worse in either direction

    def save(self, *steps: int) -> None:
        for self.step in steps:
            with torch.no_grad():
                self.model.weight += 0.01 * torch.randn_like(self.model.weight)
            self.ckpt.save(self.step)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.ckpt.close()


def tags(folder) -> dict[str, int]:
    return {tag.name: tag.step for tag in tags_of(Run(folder))}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": dq.Keep(best=1)}, [20, 60]),
        ({"keep": dq.Keep(best=2)}, [20, 40, 60]),
        ({"keep": dq.Keep(best=2, last=2)}, [20, 40, 50, 60]),
        ({"keep": dq.Keep(best=1, every=30)}, [20, 30, 60]),
        ({"keep": dq.Keep(best=2), "higher_is_better": True}, [10, 60]),
        ({"keep": dq.Keep(best=9)}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_best_checkpoints_are_kept_besides_the_others(tmp_path, options, kept):
    with Training(tmp_path, **options) as training:
        training.save(*METRICS)
        assert training.ckpt.steps() == kept
    states = [dq.load(tmp_path, step)["model"]["weight"] for step in kept]  # all of them decode
    assert len({bits(weight)[3] for weight in states}) == len(kept)


def test_the_best_are_known_after_a_resume(tmp_path):
    for steps in ([10, 20, 30], [40, 50, 60]):
        with Training(tmp_path, keep=dq.Keep(best=1)) as training:
            training.ckpt.restore()
            training.save(*steps)
    assert Run(tmp_path).steps() == [20, 60]


def test_of_equal_metrics_the_newer_counts_as_better(tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, 40, 1.0)
    with Training(tmp_path, keep=dq.Keep(best=1)) as training:
        training.save(*METRICS)
        assert training.ckpt.steps() == [40, 60]


@pytest.mark.parametrize(
    "options", [{}, {"quality": "lossless", "evaluate": lambda _: 1.0}], ids=["no metric", "lossless"]
)
def test_to_keep_the_best_without_a_metric_is_an_error_that_says_what_to_do(tmp_path, options):
    with pytest.raises(ValueError, match=r"Keep\(best=…\) needs a metric that every save evaluates: give evaluate"):
        dq.Checkpointer(tmp_path / "run", nn.Linear(2, 2), keep=dq.Keep(best=2), **options)
    assert not (tmp_path / "run").exists()


def test_steps_are_those_of_the_run_lowest_first_with_the_one_being_written(tmp_path):
    with Training(tmp_path) as training:
        assert training.ckpt.steps() == []
        training.save(30, 10, 20)
        assert training.ckpt.steps() == [10, 20, 30]


def test_a_tag_names_the_newest_or_a_step_and_moves(tmp_path):
    with Training(tmp_path, keep=dq.Keep(last=1)) as training:
        training.save(20)
        training.ckpt.tag("best")  # waits for the write
        assert tags(tmp_path) == {"best": 20}
        training.save(30, 40)
        assert training.ckpt.steps() == [20, 40]
        training.ckpt.tag("best", 40)
        training.ckpt.tag("last")
        assert tags(tmp_path) == {"best": 40, "last": 40}
        training.save(50)
        assert training.ckpt.steps() == [40, 50]
        assert training.ckpt.restore("best") == 40


def test_a_tag_of_nothing_or_with_a_wrong_name_is_an_error(tmp_path):
    with Training(tmp_path) as training:
        with pytest.raises(dq.CheckpointError, match="there are no checkpoints here"):
            training.ckpt.tag("best")
        training.save(10)
        with pytest.raises(dq.CheckpointError, match=r"no checkpoint of step 11 \(available steps: 10\)"):
            training.ckpt.tag("best", 11)
        with pytest.raises(dq.CheckpointError, match="cannot be a tag"):
            training.ckpt.tag("10")
    assert tags(tmp_path) == {}


def test_log_to_may_tag_the_checkpoint_that_was_just_committed(tmp_path):
    best = []

    def tag_the_best(record):
        if not best or record.quality.restored < best[-1]:
            best.append(record.quality.restored)
            training.ckpt.tag("best", record.step)

    with Training(tmp_path, keep=dq.Keep(last=1), log_to=tag_the_best) as training:
        training.save(*METRICS)
        assert training.ckpt.steps() == [20, 60]
    assert tags(tmp_path) == {"best": 20}
