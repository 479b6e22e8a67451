"""How much of what training has done since a restore the next checkpoints keep."""

import math

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.search import displacement
from dynaquant.search.displacement import Displacement
from dynaquant.state.roles import Label
from dynaquant.tensors.dequantize import dequantize

COARSE = dq.Configuration(bins=4, protected=0.0)
FINE = dq.Configuration(bins=64, protected=0.0)
LEAST = displacement.LEAST_KEPT

BOTH_METHODS = pytest.mark.parametrize("method", ["grid", "published"])


def checkpointer(folder, model: nn.Module, **options) -> dq.Checkpointer:
    """One that searches among k-means configurations, as published, unless told otherwise."""
    return dq.Checkpointer(folder, model, **{"method": "published"} | options)


def quantized(weights, configuration=COARSE):
    label = dict.fromkeys(weights, Label("weight", "linear"))
    return quantize_weights(kmeans_weights(weights, label, {}), configuration)


def some_weights(dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(40, 50, generator=generator).to(dtype) for name in ("a", "b")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_share_of_the_way_is_the_projection_on_it(dtype):
    origin = quantized(some_weights(dtype))
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {name: value + 0.25 for name, value in begin.items()}
    progress = Displacement(here, origin)
    assert progress.share_kept(origin) == 0
    half = {name: value + 0.125 for name, value in begin.items()}
    assert Displacement(here, origin).share_kept(quantized(half, FINE)) == pytest.approx(0.5, abs=0.15)
    assert progress.share_kept(quantized(here, FINE)) == pytest.approx(1, abs=0.15)
    stored = quantized(here)
    shares = [float((dequantize(stored[n]).double() - begin[n].double()).mean()) / 0.25 for n in here]
    assert progress.share_kept(stored) == pytest.approx(sum(min(max(share, 0), 1) for share in shares) / 2, rel=0.01)


def test_a_layer_that_moves_little_counts_as_much_as_one_that_moves_far():
    origin = quantized(some_weights())
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {"a": begin["a"] + 0.5, "b": begin["b"] + 0.005}
    stored = {"a": quantized(here, FINE)["a"], "b": origin["b"]}
    assert Displacement(here, origin).share_kept(stored) == pytest.approx(0.5, abs=0.05)


def test_going_too_far_in_one_layer_makes_up_for_nothing_in_another():
    origin = quantized(some_weights())
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {name: value + 0.1 for name, value in begin.items()}
    beyond = {name: value + 0.3 for name, value in begin.items()}
    stored = {"a": quantized(beyond, FINE)["a"], "b": origin["b"]}
    assert Displacement(here, origin).share_kept(stored) == 0.5


def test_nothing_is_lost_where_nothing_was_restored_or_has_moved():
    weights = some_weights()
    stored = quantized(weights)
    assert Displacement(weights, {}).share_kept(stored) is None
    assert Displacement({name: dequantize(q) for name, q in stored.items()}, stored).share_kept(stored) == 1


def test_only_what_was_restored_from_levels_counts_and_has_its_shape_still():
    weights = some_weights()
    origin = quantized(some_weights())
    moved = {"a": dequantize(origin["a"]) + 1e-3, "b": weights["b"]}
    alone = Displacement(moved, {"a": origin["a"]})
    assert alone.share_kept({"a": origin["a"], "b": quantized(weights)["b"]}) == 0
    reshaped = {**moved, "b": weights["b"][:10]}
    assert Displacement(reshaped, {**origin, "gone": origin["b"]}).share_kept(origin) == 0


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
        with checkpointer(folder, drift.model, **options) as ckpt:
            drift.begin = begin if ckpt.restore() is not None else drift.begin
            drift.train(distance)
            records.append(ckpt.save(step).result())
    with checkpointer(folder, drift.model, **options) as ckpt:
        ckpt.restore()
    return drift, records


def indifferent(model: nn.Module) -> float:  # noqa: ARG001
    return 1.0


@BOTH_METHODS
@pytest.mark.parametrize("evaluate", [indifferent, None])
def test_a_training_that_crashes_again_and_again_goes_on(tmp_path, evaluate, method):
    # A step is a fortieth of the distance between two of the four bins that an indifferent metric asks for.
    drift, records = crash_and_go_on(tmp_path, 0.002, evaluate=evaluate, max_degradation=0.05, method=method)
    for record in records[1:]:  # rounded at random, weights keep their way in the mean over checkpoints
        assert record.progress is None or record.progress >= LEAST or record.configuration.dithered
    assert drift.come() >= LEAST * 12 * 0.002


@pytest.mark.parametrize(("method", "evaluate"), [("grid", None), ("published", indifferent)])
def test_without_the_rule_it_would_not(tmp_path, monkeypatch, method, evaluate):
    monkeypatch.setattr(displacement, "LEAST_KEPT", -math.inf)
    drift, records = crash_and_go_on(tmp_path, 0.002, evaluate=evaluate, method=method)
    if method == "published":
        assert all(record.configuration.bins == 4 for record in records)
    assert records[-1].progress < 0.1
    assert drift.come() < 0.5 * 12 * 0.002


def after_a_restore(folder, distance: float, **options) -> tuple[dq.Record, dq.Record]:
    """The record of a first checkpoint, and that of the next, with a restore and some training in between."""
    drift = Drift()
    options.setdefault("evaluate", indifferent)
    with checkpointer(folder, drift.model, **options) as ckpt:
        first = ckpt.save(0).result()
        ckpt.restore()
        drift.train(distance)
        return first, ckpt.save(1).result()


def test_finer_levels_keep_small_steps_and_the_record_says_so(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002)
    assert first.progress is None
    assert first.notes == []
    by_quality, chosen = second.trials[0], second.configuration
    assert by_quality.configuration == first.configuration
    assert by_quality.progress < LEAST <= second.progress
    assert chosen.bins > first.configuration.bins
    assert any("displacement since the restore" in note for note in second.notes)
    # What keeps too little is not evaluated, but for what the search by quality came from.
    for trial in second.trials[1:]:
        assert (trial.degradation is None) == (trial.progress < LEAST)


def test_rounding_at_random_keeps_small_steps_and_the_record_says_so(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002, method="grid")
    assert (first.progress, first.notes, first.configuration.dithered) == (None, [], False)
    by_quality = next(trial for trial in second.trials if trial.configuration == first.configuration)
    assert by_quality.progress < LEAST
    assert second.configuration.dithered
    assert second.progress > by_quality.progress
    assert any("displacement since the restore; with stochastic rounding, " in note for note in second.notes)


def test_where_nothing_rounded_at_random_is_good_enough_what_keeps_most_is_taken(tmp_path):
    drift = Drift()
    exact = drift.model.weight.detach().clone()

    def particular(model: nn.Module) -> float:
        """Good where no weight is farther off than half the distance between two levels."""
        off = (model.weight - exact).abs().max()
        return 1.0 if off <= 0.55 * model.weight.unique().diff().min() or off == 0 else 2.0

    with checkpointer(tmp_path, drift.model, method="grid", evaluate=particular) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        drift.train(0.002)
        exact.copy_(drift.model.weight)
        second = ckpt.save(1).result()
    assert {trial.degradation for trial in second.trials if trial.configuration.dithered} == {1.0}
    assert second.quality.degradation == 0
    best = max(trial.progress for trial in second.trials if trial.degradation == 0)
    assert second.progress == best < LEAST
    assert any("displacement since the restore; with grid" in note for note in second.notes)


@BOTH_METHODS
def test_large_steps_need_nothing_finer(tmp_path, method):
    first, second = after_a_restore(tmp_path, 0.5, method=method)
    assert second.configuration == first.configuration
    assert len(second.trials) == 1
    assert second.notes == []


@BOTH_METHODS
def test_the_next_search_starts_from_what_quality_asked_for(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, method=method) as ckpt:
        first = ckpt.save(0).result().configuration
        ckpt.restore()
        drift.train(0.002)
        assert ckpt.save(1).result().configuration != first
        drift.train(0.5)
        assert ckpt.save(2).result().configuration == first


def test_less_is_pruned_where_pruning_undoes_the_way(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002)
    assert first.configuration.pruned > second.configuration.pruned


@BOTH_METHODS
def test_a_slow_layer_goes_on_beside_a_fast_one(tmp_path, method):
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(60, 50, bias=False), nn.Linear(50, 60, bias=False))

    direction = torch.randn(60, 50, generator=torch.Generator().manual_seed(7))
    begin = layers()[1].weight.detach()
    for step in range(12):
        model = layers()
        with checkpointer(tmp_path, model, evaluate=indifferent, method=method) as ckpt:
            ckpt.restore()
            with torch.no_grad():
                model[0].weight += 0.5 * torch.randn_like(model[0].weight)
                model[1].weight += 0.002 * direction
            ckpt.save(step)
    come = float((dq.load(tmp_path)["model"]["1.weight"] - begin).flatten() @ direction.flatten())
    assert come / float(direction.square().sum()) > 0.7 * 12 * 0.002


def share(folder, step: int, begin: torch.Tensor, here: torch.Tensor) -> float:
    """Of the way from ``begin`` to ``here``, what the checkpoint of a step has."""
    stored, begin, here = (w.double() for w in (dq.load(folder, step)["model"]["weight"], begin, here))
    return float(((stored - begin) * (here - begin)).sum() / (here - begin).square().sum())


@BOTH_METHODS
def test_the_way_is_that_since_the_restore_for_all_later_checkpoints(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, method=method) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        begin = drift.model.weight.detach().clone()
        for step, distance in enumerate((0.002, 0.002, 0.004), start=1):
            drift.train(distance)
            record = ckpt.save(step).result()
            expected = share(tmp_path, step, begin, drift.model.weight.detach())
            assert record.progress == pytest.approx(min(expected, 1), rel=1e-4)
            assert record.progress >= LEAST or record.configuration.dithered


@BOTH_METHODS
def test_a_second_restore_begins_another_way(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, method=method) as ckpt:
        for step, distance in enumerate((0.0, 0.5)):
            drift.train(distance)
            ckpt.save(step).result()
            ckpt.restore()
        begin = drift.model.weight.detach().clone()
        drift.train(0.002)
        record = ckpt.save(2).result()
    expected = share(tmp_path, 2, begin, drift.model.weight.detach())
    assert LEAST <= record.progress == pytest.approx(min(expected, 1), rel=1e-4)


@BOTH_METHODS
def test_a_restore_that_is_far_behind_is_forgotten(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, method=method) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        drift.train(5.0)
        assert ckpt.save(1).result().progress >= LEAST
        drift.train(0.002)
        assert ckpt.save(2).result().progress is None


def test_it_is_the_smallest_that_keeps_enough(tmp_path):
    _, second = after_a_restore(tmp_path, 0.002)
    enough = [t for t in second.trials if t.degradation is not None and t.progress >= LEAST]
    assert len(enough) > 1
    assert second.configuration == min(enough, key=lambda trial: trial.predicted).configuration
    assert second.configuration.bins <= 16


class Fussy:
    """A metric that is bad, from some moment on, for so many different weights."""

    def __init__(self, fewest: int, most: int) -> None:
        self.fewest, self.most, self.now = fewest, most, False

    def __call__(self, model: nn.Module) -> float:
        return 2.0 if self.now and self.fewest <= len(model.weight.unique()) <= self.most else 1.0


def saved_for(folder, evaluate: Fussy, distance: float = 0.002) -> tuple[dq.Record, dq.Record]:
    drift = Drift()
    with checkpointer(folder, drift.model, evaluate=evaluate) as ckpt:
        first = ckpt.save(0).result()
        ckpt.restore()
        drift.train(distance)
        evaluate.now = True
        return first, ckpt.save(1).result()


def test_what_keeps_enough_must_be_good_enough_too(tmp_path):
    first, second = saved_for(tmp_path, Fussy(9, 60))
    assert second.trials[0].configuration == first.configuration != second.configuration
    assert any(trial.degradation == 1 for trial in second.trials)
    assert second.quality.degradation <= second.limit
    assert second.progress >= LEAST


def test_where_nothing_keeps_enough_what_keeps_most_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(displacement, "LEAST_KEPT", 1.1)
    first, second = after_a_restore(tmp_path, 0.002)
    assert second.configuration != first.configuration
    assert second.progress == max(trial.progress for trial in second.trials)
    assert second.quality.degradation == 0


def test_where_nothing_finer_is_good_enough_quality_decides_and_a_note_says_what_is_lost(tmp_path):
    first, second = saved_for(tmp_path, Fussy(9, 2000))
    assert second.configuration == first.configuration
    assert second.progress < LEAST
    assert any(f"keeps only {second.progress:.0%} of the displacement" in note for note in second.notes)


def test_a_metric_that_fails_on_a_finer_candidate_is_noted(tmp_path):
    class Failing(Fussy):
        def __call__(self, model: nn.Module) -> float:
            if super().__call__(model) == 2:
                raise ZeroDivisionError("too fine")
            return 1.0

    _, second = saved_for(tmp_path, Failing(9, 60))
    assert any("evaluate failed on a candidate (ZeroDivisionError: too fine)" in note for note in second.notes)


def test_a_configuration_of_the_users_is_kept_and_what_it_keeps_recorded(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002, configuration=dq.Configuration(bins=4))
    assert second.configuration == first.configuration
    assert second.progress < LEAST
    assert second.search == "fixed"


@BOTH_METHODS
def test_records_with_progress_read_back(tmp_path, method):
    records = after_a_restore(tmp_path, 0.002, method=method)
    with checkpointer(tmp_path, Drift().model) as ckpt:
        for record, back in zip(records, ckpt.records(), strict=True):
            assert back.progress == record.progress
            assert back.trials == record.trials
            assert back.to_json()["trials"][0]["progress"] == record.trials[0].progress
