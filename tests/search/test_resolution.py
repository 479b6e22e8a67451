"""A metric that moves in steps larger than what a checkpoint may lose: the estimate bounds the search."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from launched import launch
from movement import Movement
from searches import loss, training_of
from torch import nn
from training import train

import dynaquant as dq
from dynaquant.engine.quantize.knobs import Configuration, GridConfiguration
from dynaquant.methods.grid.method import BEYOND_ESTIMATE
from dynaquant.saving.record import degradation_of
from dynaquant.search.scores import Trial
from dynaquant.search.search_memory import SearchMemory
from dynaquant.search.stepped_search import is_too_coarse, one_step_more, resolution_of

COARSE = "moves in steps"
STEP = 0.05
BATCHES = list(torch.arange(40).split(5))


def trials(*scored, share=1.0):
    """Trials of grids. scored: pairs of a scale exponent and a degradation."""
    return [Trial(GridConfiguration(scale), None, worse, None, 0.0, share=share) for scale, worse in scored]


def in_steps(model: nn.Module) -> float:
    """Return the loss, rounded to steps of 5 % of the loss at the beginning."""
    return round(loss(model) / STEP / 3.7) * STEP * 3.7


def accuracy(model: nn.Module) -> float:
    """Return the share of 40 classes that are right."""
    return float((model.eval()(torch.arange(40)).argmax(-1) == torch.arange(40)).double().mean())


def saved(folder, metric, saves: int = 8, restore: bool = False, **options) -> list[dq.Record]:
    """Train, and save every few steps, in a new Checkpointer each time if it is to restore. Returns the records."""
    model, optimizer = training_of()
    ckpt = dq.Checkpointer(folder, model, optimizer, evaluate=metric, **options)
    for step in range(1, saves + 1):
        train(model, optimizer, 5)
        ckpt.save(step).result()
        if restore:
            ckpt.close()
            ckpt = dq.Checkpointer(folder, model, optimizer, evaluate=metric, **options)
            assert ckpt.restore() == step
    records = ckpt.records()
    ckpt.close()
    return records


# What says that a metric moves in steps


@pytest.mark.parametrize(
    ("found", "known", "expected"),
    [
        (trials((-60, 0.003)), None, None),
        (trials((-60, 0.003), (-74, 0.001)), None, None),
        (trials((-60, 0.003), (-66, 0.003)), None, None),  # nearly the same grid
        (trials((-60, 0.003), (-74, 0.003)), None, 0.003),
        (trials((-60, 0.003), (-74, 0.003 + 1e-8)), None, 0.003),  # the same counts in another order
        (trials((-60, 0.006), (-74, -0.003), (-90, 0.006)), None, 0.003),
        (trials((-60, 0.006), (-74, 0.006), (-90, 0.005)), None, pytest.approx(0.001)),  # between two candidates
        (trials((-60, 0.0), (-74, 0.0)), None, math.inf),
        (trials((-60, 0.0)), None, math.inf),
        (trials((-60, 0.0), share=0.5), None, math.inf),
        (trials((-60, 0.0), (-74, 0.001)), None, None),
        (trials((-60, 0.0), (-74, 0.0)), 0.003, math.inf),  # an accuracy that has become 1
        (trials((-60, 0.0), (-74, 0.0), share=0.5), 0.003, math.inf),
        (trials((-60, 0.0)), 0.003, 0.003),  # the same by chance
        (trials((-60, 0.0)), math.inf, math.inf),
        (trials((-60, 0.004)), math.inf, 0.004),
        (trials((-60, 0.004)), 0.003, 0.003),
        (trials((-60, 0.001)), 0.003, 0.001),  # another metric
        (trials((-60, 0.003), (-74, 0.003), share=0.5), None, None),  # an estimate on some of the batches
        (trials((-60, math.inf), (-74, math.inf)), None, None),
        (trials((-60, math.nan), (-74, None)), None, None),
        ([], None, None),
        ([], 0.003, 0.003),
    ],
)
def test_equal_numbers_for_clearly_different_grids_are_steps(found, known, expected):
    assert resolution_of(found, known) == expected


def test_published_configurations_say_nothing_about_steps():
    found = [Trial(Configuration(bins=bins), None, 0.003, None, 0.0) for bins in (4, 64)]
    assert resolution_of(found, None) is None


def test_a_metric_is_too_coarse_if_its_step_is_larger_than_the_limit():
    assert [is_too_coarse(each, 0.002) for each in (None, 0.001, 0.002, 0.003, math.inf)] == 3 * [False] + 2 * [True]
    assert is_too_coarse(0.003, 0.0)  # no loss is allowed
    assert not is_too_coarse(0.003, -0.001)  # the noise of the metric leaves nothing
    assert one_step_more(0.003, 0.002, 0.01) == 0.005
    assert one_step_more(0.03, 0.002, 0.01) == 0.01
    assert one_step_more(math.inf, 0.002, 0.01) == one_step_more(0.03, 0.002, 0.001) == 0.002
    assert one_step_more(0.003, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("resolution", [None, 0.003, math.inf])
def test_a_record_keeps_the_resolution(resolution):
    memory = SearchMemory(resolution=resolution)
    assert SearchMemory.from_record({"search": memory.to_json()}, {}).resolution == resolution


@pytest.mark.parametrize("invalid", ["much", [], {}, math.nan, -1.0, 0.0, "nan", 10**400])
def test_an_invalid_resolution_is_ignored(invalid):
    assert SearchMemory.from_record({"search": {"resolution": invalid}}, {}).resolution is None


# What follows from it


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize(("metric", "options"), [(in_steps, {}), (accuracy, {"higher_is_better": True})])
def test_weights_are_about_as_coarse_as_without_a_metric(tmp_path, caplog, metric, options, restore):
    options |= {"quality": dq.Quality(max_degradation=0.02)}
    records = saved(tmp_path / "metric", metric, restore=restore, **options)
    without = saved(tmp_path / "estimate", None, restore=restore, quality=options["quality"])
    coarse = [any(COARSE in note or "is the same" in note for note in record.notes) for record in records]
    known = coarse.index(True)
    assert sum(coarse) >= len(records) - known - 1
    messages = [each for each in caplog.messages if COARSE in each or "is the same" in each]
    assert 1 <= len(messages) <= 2  # once in a training; again if the metric told enough in between
    for record, estimated in zip(records[known + 1 :], without[known + 1 :], strict=True):
        assert record.judged_by == "evaluate"
        assert record.quality.degradation <= record.limit <= 0.02
        # The estimate's own scale depends by up to an octave on where it began.
        assert record.configuration.scale <= estimated.configuration.scale + BEYOND_ESTIMATE + 16
        assert len(record.trials) <= 4


class OneStepWorse(Movement):
    """A metric that is 0.25 % worse for all other weights than those in training."""

    def __call__(self, model: nn.Module) -> float:
        return 1.0025 if self.moved(model) > 0 else 1.0


def test_a_candidate_may_be_one_step_worse_and_a_restore_counts_as_what_was_allowed_without_it(tmp_path):
    """By default a checkpoint may lose 0.125 % at first, and 1 % at most."""
    limits, felt = [], []
    for step in range(1, 6):
        model, optimizer = training_of()
        metric = OneStepWorse(model, 1.0)
        with dq.Checkpointer(tmp_path, model, optimizer, evaluate=metric) as ckpt:
            assert ckpt.restore() == (step - 1 or None)
            train(model, optimizer, 5)
            metric.remember()
            record = ckpt.save(step).result()
            limits.append(record.limit)
            felt.append(record.restores_felt)
            assert record.quality.degradation == pytest.approx(0.0025)
            assert any("moves in steps of 0.25%" in note for note in record.notes)
    allowed = [limit - 0.0025 for limit in limits]
    assert allowed[0] == pytest.approx(0.00125)
    assert allowed[1:] == pytest.approx([max((0.005 - spent) / 4, 0.0005) for spent in felt[1:]])
    assert [after - before for before, after in pairwise(felt)] == pytest.approx(allowed[:-1])


def test_an_accuracy_on_batches_that_has_become_1_is_found_out(tmp_path):
    def right(model: nn.Module, batch: torch.Tensor) -> float:
        return float((model(batch).argmax(1) == batch).float().mean())

    model, optimizer = training_of()
    train(model, optimizer, 120)
    evaluate = dq.LossOn(BATCHES, right)
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, higher_is_better=True) as ckpt:
        record = ckpt.save(1).result()
    assert record.quality.original == 1.0
    assert any("the metric is the same for all weights tried" in note for note in record.notes)


def test_weights_that_have_not_changed_say_nothing_about_the_metric(tmp_path):
    model, optimizer = training_of()
    train(model, optimizer, 5)
    for step in (1, 2, 3):
        with dq.Checkpointer(tmp_path, model, optimizer, evaluate=loss) as ckpt:
            assert ckpt.restore() == (step - 1 or None)
            assert ckpt.save(step).result().notes == []


@pytest.mark.slow
def test_ranks_that_average_a_coarse_or_blind_metric_save(tmp_path):
    script = Path(__file__).parents[1] / "support" / "averaging_ranks.py"
    status, output = launch(script, 2, 150, tmp_path)
    assert status == 0, output
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert any(COARSE in note or "is the same" in note for save in first["accuracy"] for note in save["notes"])
    assert all(save["judged_by"] == "evaluate" for save in first["accuracy"])
    assert all(save["judged_by"] == "fisher distortion" for save in first["constant"])


def test_a_finer_metric_decides_again(tmp_path):
    quality = dq.Quality(max_degradation=0.02)
    model, optimizer = training_of()
    found = []
    for step, metric in enumerate([in_steps, in_steps, in_steps, loss, loss, loss], start=1):
        with dq.Checkpointer(tmp_path, model, optimizer, evaluate=metric, quality=quality) as ckpt:
            assert ckpt.restore() == (step - 1 or None)
            train(model, optimizer, 5)
            found.append(ckpt.save(step).result())
    assert any(COARSE in note or "is the same" in note for note in found[2].notes)
    assert not any(COARSE in note or "is the same" in note for record in found[3:] for note in record.notes)
    assert all(record.limit == 0.02 and record.quality.degradation <= 0.02 for record in found)


def test_a_restore_counts_as_what_the_estimate_allowed():
    def record(**search):
        return {"configuration": {"scale": -60}, "quality": {"degradation": 0.0}, "search": search}

    assert degradation_of(record(judged_by="evaluate", limit=0.004)) == 0.0
    assert degradation_of(record(judged_by="evaluate", limit=0.004, estimated=0.001)) == 0.001
    assert degradation_of(record(judged_by="distortion", limit=0.004)) == 0.004
    assert degradation_of(record(judged_by="evaluate", estimated=0.001) | {"configuration": None}) == 0.0
