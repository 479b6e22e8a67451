"""After a restore: how much of what training has done since its next checkpoint keeps."""

import math

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.quantize.checkpoint import quantize_weights, sketch_weights
from dynaquant.quantized import dequantize
from dynaquant.roles import Label
from dynaquant.search import manager
from dynaquant.search.progress import Progress

COARSE = dq.Configuration(bins=4, protected=0.0)
FINE = dq.Configuration(bins=64, protected=0.0)
LEAST = manager.PROGRESS


def quantized(weights, configuration=COARSE):
    label = dict.fromkeys(weights, Label("weight", "linear"))
    return quantize_weights(sketch_weights(weights, label, {}), configuration)


def some_weights(dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(40, 50, generator=generator).to(dtype) for name in ("a", "b")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_share_of_the_way_is_the_projection_on_it(dtype):
    origin = quantized(some_weights(dtype))
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {name: value + 0.25 for name, value in begin.items()}
    progress = Progress(here, origin)
    assert progress.kept(origin) == 0
    for configuration in (COARSE, FINE):
        stored = quantized(here, configuration)
        come = sum(float((dequantize(q).double() - begin[n].double()).sum() * 0.25) for n, q in stored.items())
        assert progress.kept(stored) == pytest.approx(come / (4000 * 0.25**2), rel=0.01)
    assert progress.kept(quantized(here, FINE)) == pytest.approx(1, abs=0.15)


def test_nothing_is_lost_where_nothing_was_restored_or_has_moved():
    weights = some_weights()
    stored = quantized(weights)
    assert Progress(weights, {}).kept(stored) == 1
    assert Progress({name: dequantize(q) for name, q in stored.items()}, stored).kept(stored) == 1


def test_only_what_was_restored_from_levels_counts_and_has_its_shape_still():
    weights = some_weights()
    origin = quantized(some_weights())
    moved = {"a": dequantize(origin["a"]) + 1e-3, "b": weights["b"]}
    alone = Progress(moved, {"a": origin["a"]})
    assert alone.kept({"a": origin["a"], "b": quantized(weights)["b"]}) == 0
    reshaped = {**moved, "b": weights["b"][:10]}
    assert Progress(reshaped, {**origin, "gone": origin["b"]}).kept(origin) == 0


class Drift:
    """A training whose weights all move by the same small random steps, whatever they are."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(60, 50, bias=False)
        self.begin = self.model.weight.detach().clone()
        self.direction = torch.randn(50, 60, generator=torch.Generator().manual_seed(7))

    def train(self, distance: float) -> None:
        with torch.no_grad():
            self.model.weight += distance * self.direction

    def come(self) -> float:
        """How far the weights have come in the direction of training."""
        return float((self.model.weight.detach() - self.begin).flatten() @ self.direction.flatten()) / 3000


def crash_and_go_on(folder, distance: float, **options) -> tuple[Drift, list[dq.Record]]:
    """Twelve times a checkpoint after a bit of training, and a restore from it."""
    records = []
    drift = Drift()
    for step in range(12):
        begin, drift = drift.begin, Drift(step)
        with dq.Checkpointer(folder, drift.model, **options) as ckpt:
            drift.begin = begin if ckpt.restore() is not None else drift.begin
            drift.train(distance)
            records.append(ckpt.save(step).result())
    with dq.Checkpointer(folder, drift.model, **options) as ckpt:
        ckpt.restore()
    return drift, records


def indifferent(model: nn.Module) -> float:  # noqa: ARG001
    return 1.0


@pytest.mark.parametrize("evaluate", [indifferent, None])
def test_a_training_that_crashes_again_and_again_goes_on(tmp_path, evaluate):
    # A step is a fortieth of the distance between two of the four bins that an indifferent metric asks for.
    drift, records = crash_and_go_on(tmp_path, 0.002, evaluate=evaluate, max_degradation=0.05)
    assert all(record.progress >= LEAST for record in records)
    assert drift.come() >= LEAST * 12 * 0.002


def test_without_the_rule_it_would_not(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "PROGRESS", -math.inf)
    drift, records = crash_and_go_on(tmp_path, 0.002, evaluate=indifferent)
    assert all(record.configuration.bins == 4 for record in records)
    assert records[-1].progress < 0.1
    assert drift.come() < 0.5 * 12 * 0.002


def after_a_restore(folder, distance: float, **options) -> tuple[dq.Record, dq.Record]:
    """The record of a first checkpoint, and that of the next, with a restore and some training in between."""
    drift = Drift()
    options.setdefault("evaluate", indifferent)
    with dq.Checkpointer(folder, drift.model, **options) as ckpt:
        first = ckpt.save(0).result()
        ckpt.restore()
        drift.train(distance)
        return first, ckpt.save(1).result()


def test_finer_levels_keep_small_steps_and_the_record_says_so(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002)
    assert first.progress == 1
    assert first.notes == []
    by_quality, chosen = second.trials[0], second.configuration
    assert by_quality.configuration == first.configuration
    assert by_quality.progress < LEAST <= second.progress
    assert chosen.bins > first.configuration.bins
    assert any("of the way since the restore" in note for note in second.notes)
    # What keeps too little is not evaluated, but for what the search by quality came from.
    for trial in second.trials[1:]:
        assert (trial.degradation is None) == (trial.progress < LEAST)


def test_large_steps_need_nothing_finer(tmp_path):
    first, second = after_a_restore(tmp_path, 0.5)
    assert second.configuration == first.configuration
    assert len(second.trials) == 1
    assert second.notes == []


def test_the_next_search_starts_from_what_quality_asked_for(tmp_path):
    drift = Drift()
    with dq.Checkpointer(tmp_path, drift.model, evaluate=indifferent) as ckpt:
        first = ckpt.save(0).result().configuration
        ckpt.restore()
        drift.train(0.002)
        assert ckpt.save(1).result().configuration != first
        drift.train(0.5)
        assert ckpt.save(2).result().configuration == first


def test_less_is_pruned_where_pruning_undoes_the_way(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002)
    assert first.configuration.pruned > second.configuration.pruned


def test_where_no_levels_are_fine_enough_the_finest_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "PROGRESS", 10.0)
    _, second = after_a_restore(tmp_path, 0.002)
    assert (second.configuration.bins, second.configuration.pruned) == (254, 0)
    assert second.quality["degradation"] == 0
    assert any("of the way since the restore; 254 keep" in note for note in second.notes)


def test_where_not_even_the_finest_are_good_enough_quality_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "PROGRESS", 10.0)

    def evaluate(model: nn.Module) -> float:
        """Bad for as many different weights as 254 bins and a few protected ones make, but not for all of them."""
        return 2.0 if 200 < len(model.weight.unique()) < 2000 else 1.0

    first, second = after_a_restore(tmp_path, 0.002, evaluate=evaluate)
    assert second.configuration == first.configuration
    assert any(trial.configuration.bins == 254 and trial.degradation == 1 for trial in second.trials)


def test_what_is_finer_must_be_good_enough_too(tmp_path):
    limit = {"bins": 256}

    def evaluate(model: nn.Module) -> float:
        """Bad for more than so many different weights, but for the weights in training."""
        values = len(model.weight.unique())
        return 2.0 if limit["bins"] < values < 2000 else 1.0

    drift = Drift()
    with dq.Checkpointer(tmp_path, drift.model, evaluate=evaluate) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        drift.train(0.002)
        limit["bins"] = 25
        record = ckpt.save(1).result()
    assert record.quality["degradation"] <= record.limit
    assert any(trial.degradation is not None and trial.degradation > 0.01 for trial in record.trials)


def test_a_configuration_of_the_users_is_kept_and_what_it_keeps_recorded(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002, configuration=dq.Configuration(bins=4))
    assert second.configuration == first.configuration
    assert second.progress < LEAST
    assert second.search == "fixed"


def test_records_with_progress_read_back(tmp_path):
    records = after_a_restore(tmp_path, 0.002)
    with dq.Checkpointer(tmp_path, Drift().model) as ckpt:
        for record, back in zip(records, ckpt.records(), strict=True):
            assert back.progress == record.progress
            assert back.trials == record.trials
            assert back.to_json()["trials"][0]["progress"] == record.trials[0].progress
