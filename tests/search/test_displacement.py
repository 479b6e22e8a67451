"""Checkpoints after a restore keep most of the displacement since that restore."""

import math
import re

import pytest
import torch
from ranks_in_threads import divided, local, on_ranks
from searches import BOTH_METHODS, checkpointer
from torch import nn

import dynaquant as dq
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.stored import cut
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import in_short
from dynaquant.engine.shards import Shards
from dynaquant.methods.published import search as published_search
from dynaquant.search import displacement
from dynaquant.search.displacement import Displacement

COARSE = dq.Configuration(bins=4, protected=0.0)
FINE = dq.Configuration(bins=64, protected=0.0)
LEAST = {"grid": 0.99, "published": 0.95}


def keeps_enough(record: dq.Record, method: str) -> bool:
    """Whether a checkpoint keeps enough. Stochastic rounding does on average over checkpoints."""
    return record.progress >= LEAST[method] or (method == "grid" and record.configuration.dithered)


def quantized(weights, configuration=COARSE):
    label = dict.fromkeys(weights, Label("weight", "linear"))
    return quantize_weights(kmeans_weights(weights, label, {}), configuration)


def some_weights(dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(40, 50, generator=generator).to(dtype) for name in ("a", "b")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_share_kept_is_the_projection_on_the_displacement(dtype):
    origin = quantized(some_weights(dtype))
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {name: value + 0.25 for name, value in begin.items()}
    since_restore = Displacement(here, origin)
    assert since_restore.share_kept(origin) == 0
    half = {name: value + 0.125 for name, value in begin.items()}
    assert Displacement(here, origin).share_kept(quantized(half, FINE)) == pytest.approx(0.5, abs=0.15)
    assert since_restore.share_kept(quantized(here, FINE)) == pytest.approx(1, abs=0.15)
    stored = quantized(here)
    shares = [float((dequantize(stored[n]).double() - begin[n].double()).mean()) / 0.25 for n in here]
    assert since_restore.share_kept(stored) == pytest.approx(
        sum(min(max(share, 0), 1) for share in shares) / 2, rel=0.01
    )


def test_ranks_find_the_same_share_also_if_one_holds_nothing_of_a_tensor():
    origin = quantized(some_weights())
    here = {name: dequantize(stored) + 0.25 for name, stored in origin.items()}
    stored = quantized(here)
    shards = {"a": divided((40, 50), {0: (3, 1)}), "b": [s.nothing(s.shape) for s in divided((40, 50), {})] * 3}
    shards["b"][1] = divided((40, 50), {})[0]

    def parts(forms, rank):
        return {n: cut(forms[n], shards[n][rank].boxes[0][0]) for n in forms if shards[n][rank].boxes}

    def share(rank, reduce):
        own = Shards({name: each[rank] for name, each in shards.items()}, frozenset(), reduce)
        weights = {name: local(here[name], shards[name][rank]) for name in here}
        since_restore = Displacement(weights, parts(origin, rank), own)
        return since_restore.matters, since_restore.share_kept(parts(stored, rank))

    found, _ = on_ranks(3, share)
    assert found == [(True, pytest.approx(Displacement(here, origin).share_kept(stored)))] * 3
    unknown, _ = on_ranks(3, lambda _, reduce: Displacement(here, {}, Shards(reduce=reduce)).matters)
    assert unknown == [False] * 3


def test_a_layer_that_moves_little_counts_as_much_as_one_that_moves_far():
    origin = quantized(some_weights())
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {"a": begin["a"] + 0.5, "b": begin["b"] + 0.005}
    stored = {"a": quantized(here, FINE)["a"], "b": origin["b"]}
    assert Displacement(here, origin).share_kept(stored) == pytest.approx(0.5, abs=0.05)


def test_overshooting_in_one_layer_does_not_compensate_for_another():
    origin = quantized(some_weights())
    begin = {name: dequantize(stored) for name, stored in origin.items()}
    here = {name: value + 0.1 for name, value in begin.items()}
    beyond = {name: value + 0.3 for name, value in begin.items()}
    stored = {"a": quantized(beyond, FINE)["a"], "b": origin["b"]}
    assert Displacement(here, origin).share_kept(stored) == 0.5


def test_nothing_is_lost_if_nothing_was_restored_or_nothing_has_moved():
    weights = some_weights()
    stored = quantized(weights)
    assert Displacement(weights, {}).share_kept(stored) is None
    assert Displacement({name: dequantize(q) for name, q in stored.items()}, stored).share_kept(stored) == 1


def test_only_tensors_restored_from_levels_that_still_have_their_shape_count():
    weights = some_weights()
    origin = quantized(some_weights())
    moved = {"a": dequantize(origin["a"]) + 1e-3, "b": weights["b"]}
    alone = Displacement(moved, {"a": origin["a"]})
    assert alone.share_kept({"a": origin["a"], "b": quantized(weights)["b"]}) == 0
    reshaped = {**moved, "b": weights["b"][:10]}
    assert Displacement(reshaped, {**origin, "gone": origin["b"]}).share_kept(origin) == 0


class Drift:
    """A training that moves its weights in a fixed random direction, whatever their values are."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(60, 50, bias=False)
        self.begin = self.model.weight.detach().clone()
        self.direction = torch.randn(50, 60, generator=torch.Generator().manual_seed(7))

    def train(self, distance: float) -> None:
        with torch.no_grad():
            self.model.weight += distance * self.direction

    def distance(self) -> float:
        """Returns how far the weights have moved in that direction."""
        return float((self.model.weight.detach() - self.begin).flatten() @ self.direction.flatten()) / 3000


def crash_and_continue(folder, distance: float, **options) -> tuple[Drift, list[dq.Record]]:
    """Twelve times: trains a little, saves, and restores that checkpoint. Returns the training and all records."""
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


def indifferent(model: nn.Module) -> float:
    """All weights are as good as equal, unless they are all zero. Equal numbers would be those of a coarse metric."""
    total = sum(float(weight.double().sum()) for weight in model.parameters())
    return 1.0 + 1e-5 * total if any(weight.any() for weight in model.parameters()) else 2.0


@BOTH_METHODS
@pytest.mark.parametrize("evaluate", [indifferent, None])
def test_a_training_that_crashes_again_and_again_makes_progress(tmp_path, evaluate, method):
    # The metric accepts four bins; the weights move by a fortieth of the distance between two of them.
    drift, records = crash_and_continue(
        tmp_path, 0.002, evaluate=evaluate, quality=dq.Quality(max_degradation=0.05, method=method)
    )
    for record in records[1:]:
        assert record.progress is None or keeps_enough(record, method)
    assert drift.distance() >= LEAST[method] * 12 * 0.002


@pytest.mark.parametrize(("method", "evaluate"), [("grid", None), ("published", indifferent)])
@pytest.mark.usefixtures("coarse_grids")
def test_without_the_rule_about_displacement_it_would_make_no_progress(tmp_path, monkeypatch, method, evaluate):
    for module in (displacement, published_search):
        monkeypatch.setattr(module, "LEAST_KEPT", -math.inf)
    drift, records = crash_and_continue(
        tmp_path, 0.002, evaluate=evaluate, quality=dq.Quality(max_degradation=0.01, method=method)
    )
    if method == "published":
        assert all(record.configuration.bins == 4 for record in records)
    assert records[-1].progress < 0.1
    assert drift.distance() < 0.5 * 12 * 0.002


def after_a_restore(folder, distance: float, **options) -> tuple[dq.Record, dq.Record]:
    """Saves, restores, trains a little and saves again. Returns both records."""
    drift = Drift()
    options.setdefault("evaluate", indifferent)
    with checkpointer(folder, drift.model, **options) as ckpt:
        first = ckpt.save(0).result()
        ckpt.restore()
        drift.train(distance)
        return first, ckpt.save(1).result()


def test_finer_levels_keep_small_displacements_and_the_record_says_so(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002)
    assert first.progress is None
    assert first.notes == []
    by_quality, chosen = second.trials[0], second.configuration
    assert by_quality.configuration == first.configuration
    assert by_quality.progress < LEAST["published"] <= second.progress
    assert chosen.bins > first.configuration.bins
    (note,) = second.notes
    kept = [int(share) / 100 for share in re.findall(r"(\d+)%(?! pruned)", note)]
    assert note.startswith(f"{in_short(chosen)}: keeps ")
    assert f"since the restore; {in_short(by_quality.configuration)} would keep only" in note
    assert kept == pytest.approx([second.progress, by_quality.progress], abs=0.005)
    # Configurations that keep too little are not evaluated, except for the result of the search by quality.
    for trial in second.trials[1:]:
        assert (trial.degradation is None) == (trial.progress < LEAST["published"])


def test_stochastic_rounding_keeps_small_displacements_and_the_record_says_so(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002, quality=dq.Quality(method="grid"))
    assert (first.progress, first.notes, first.configuration.dithered) == (None, [], False)
    assert second.configuration.dithered
    # It is known without an evaluation that rounding to the nearest level keeps too little.
    assert all(trial.configuration.dithered for trial in second.trials)
    (note,) = second.notes
    said = r"stochastic rounding: rounding to the nearest level would keep only (\d+)% of .*, this keeps (\d+)%"
    by_rounding, kept = (int(share) / 100 for share in re.fullmatch(said, note).groups())
    assert by_rounding < min(LEAST["grid"], second.progress)
    assert kept == pytest.approx(second.progress, abs=0.005)


def test_if_stochastic_rounding_is_never_good_enough_the_configuration_that_keeps_most_is_chosen(tmp_path):
    drift = Drift()
    exact = drift.model.weight.detach().clone()

    def demanding(model: nn.Module) -> float:
        """Good if no weight is off by more than half the distance between two levels."""
        off = (model.weight - exact).abs().max()
        good = off <= 0.55 * model.weight.unique().diff().min() or off == 0
        return (1.0 if good else 2.0) + 1e-5 * float(model.weight.double().sum())  # and no metric in coarse steps

    with checkpointer(tmp_path, drift.model, quality=dq.Quality(method="grid"), evaluate=demanding) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        drift.train(0.002)
        exact.copy_(drift.model.weight)
        second = ckpt.save(1).result()
    dithered = [trial.degradation for trial in second.trials if trial.configuration.dithered]
    assert dithered == [pytest.approx(1, abs=1e-3)] * len(dithered) != []
    assert second.quality.degradation == pytest.approx(0, abs=1e-3)
    best = max(trial.progress for trial in second.trials if trial.degradation < 0.5)
    assert second.progress == best < LEAST["grid"]
    said = f"{in_short(second.configuration)}: keeps only {best:.0%} of what weights have moved since the restore, "
    assert any(note.startswith(said) for note in second.notes)


@BOTH_METHODS
def test_large_displacements_need_no_finer_configuration(tmp_path, method):
    first, second = after_a_restore(tmp_path, 0.5, quality=dq.Quality(method=method))
    assert is_no_finer(second.configuration, first.configuration)
    assert not any(getattr(trial.configuration, "dithered", False) for trial in second.trials)
    assert second.notes == []


@BOTH_METHODS
def test_the_next_search_starts_from_the_result_of_the_search_by_quality(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, quality=dq.Quality(method=method)) as ckpt:
        first = ckpt.save(0).result().configuration
        ckpt.restore()
        drift.train(0.002)
        assert ckpt.save(1).result().configuration != first
        drift.train(0.5)
        assert is_no_finer(ckpt.save(2).result().configuration, first)


def is_no_finer(configuration, first) -> bool:
    """Whether a search by quality alone has found it: on a grid, the more has been learned, the larger steps may be."""
    if isinstance(first, dq.GridConfiguration):
        return configuration.scale >= first.scale and not configuration.dithered
    return configuration == first


def test_less_is_pruned_if_pruning_undoes_the_displacement(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002)
    assert first.configuration.pruned > second.configuration.pruned


@BOTH_METHODS
def test_a_slow_layer_makes_progress_beside_a_fast_one(tmp_path, method):
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(60, 50, bias=False), nn.Linear(50, 60, bias=False))

    direction = torch.randn(60, 50, generator=torch.Generator().manual_seed(7))
    begin = layers()[1].weight.detach()
    for step in range(12):
        model = layers()
        with checkpointer(tmp_path, model, evaluate=indifferent, quality=dq.Quality(method=method)) as ckpt:
            ckpt.restore()
            with torch.no_grad():
                model[0].weight += 0.5 * torch.randn_like(model[0].weight)
                model[1].weight += 0.002 * direction
            ckpt.save(step)
    moved = float((dq.load(tmp_path)["model"]["1.weight"] - begin).flatten() @ direction.flatten())
    assert moved / float(direction.square().sum()) > 0.7 * 12 * 0.002


def share_kept(folder, step: int, begin: torch.Tensor, here: torch.Tensor) -> float:
    """Returns the share of the displacement from ``begin`` to ``here`` that the checkpoint of a step keeps."""
    stored, begin, here = (w.double() for w in (dq.load(folder, step)["model"]["weight"], begin, here))
    return float(((stored - begin) * (here - begin)).sum() / (here - begin).square().sum())


@BOTH_METHODS
@pytest.mark.usefixtures("coarse_grids")
def test_the_displacement_is_measured_from_the_restore_for_all_later_checkpoints(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, quality=dq.Quality(method=method)) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        begin = drift.model.weight.detach().clone()
        for step, distance in enumerate((0.002, 0.002, 0.004), start=1):
            drift.train(distance)
            record = ckpt.save(step).result()
            expected = share_kept(tmp_path, step, begin, drift.model.weight.detach())
            assert record.progress == pytest.approx(min(expected, 1), rel=1e-4)
            assert keeps_enough(record, method)


@BOTH_METHODS
def test_after_a_second_restore_the_displacement_is_measured_from_there(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, quality=dq.Quality(method=method)) as ckpt:
        for step, distance in enumerate((0.0, 0.5)):
            drift.train(distance)
            ckpt.save(step).result()
            ckpt.restore()
        begin = drift.model.weight.detach().clone()
        drift.train(0.002)
        record = ckpt.save(2).result()
    expected = share_kept(tmp_path, 2, begin, drift.model.weight.detach())
    assert LEAST[method] <= record.progress == pytest.approx(min(expected, 1), rel=1e-4)


@BOTH_METHODS
def test_once_the_displacement_is_large_the_restore_no_longer_matters(tmp_path, method):
    drift = Drift()
    with checkpointer(tmp_path, drift.model, evaluate=indifferent, quality=dq.Quality(method=method)) as ckpt:
        ckpt.save(0).result()
        ckpt.restore()
        drift.train(5.0)
        assert ckpt.save(1).result().progress >= LEAST[method]
        drift.train(0.002)
        assert ckpt.save(2).result().progress is None


def test_the_smallest_configuration_that_keeps_enough_is_chosen(tmp_path):
    _, second = after_a_restore(tmp_path, 0.002)
    enough = [t for t in second.trials if t.degradation is not None and t.progress >= LEAST["published"]]
    assert len(enough) > 1
    assert second.configuration == min(enough, key=lambda trial: trial.predicted).configuration
    assert second.configuration.bins <= 16


class BadForSome:
    """A metric that turns bad, once ``now`` is set, for weights with a certain number of different values.

    All zero is bad at any time.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self.fewest, self.most, self.now = fewest, most, False

    def __call__(self, model: nn.Module) -> float:
        if not model.weight.any():
            return 2.0
        return 2.0 if self.now and self.fewest <= len(model.weight.unique()) <= self.most else 1.0


def saved_for(folder, evaluate: BadForSome, distance: float = 0.002) -> tuple[dq.Record, dq.Record]:
    drift = Drift()
    with checkpointer(folder, drift.model, evaluate=evaluate) as ckpt:
        first = ckpt.save(0).result()
        ckpt.restore()
        drift.train(distance)
        evaluate.now = True
        return first, ckpt.save(1).result()


def test_a_configuration_that_keeps_enough_must_be_good_enough_too(tmp_path):
    first, second = saved_for(tmp_path, BadForSome(9, 60))
    assert second.trials[0].configuration == first.configuration != second.configuration
    assert any(trial.degradation == 1 for trial in second.trials)
    assert second.quality.degradation <= second.limit
    assert second.progress >= LEAST["published"]


def test_if_no_configuration_keeps_enough_the_one_that_keeps_most_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(published_search, "LEAST_KEPT", 1.1)
    first, second = after_a_restore(tmp_path, 0.002)
    assert second.configuration != first.configuration
    assert second.progress == max(trial.progress for trial in second.trials)
    assert second.quality.degradation == pytest.approx(0, abs=1e-3)


def test_if_no_finer_configuration_is_good_enough_quality_decides_and_a_note_says_so(tmp_path):
    first, second = saved_for(tmp_path, BadForSome(9, 2000))
    assert second.configuration == first.configuration
    assert second.progress < LEAST["published"]
    assert any(f"keeps only {second.progress:.0%} of what weights have moved" in note for note in second.notes)


def test_a_failure_of_the_metric_on_a_finer_candidate_is_noted(tmp_path):
    class Failing(BadForSome):
        def __call__(self, model: nn.Module) -> float:
            if super().__call__(model) == 2:
                raise ZeroDivisionError("too fine")
            return 1.0

    _, second = saved_for(tmp_path, Failing(9, 60))
    assert any("evaluate failed on a candidate (ZeroDivisionError: too fine)" in note for note in second.notes)


def test_with_the_users_configuration_the_share_kept_is_only_recorded(tmp_path):
    first, second = after_a_restore(tmp_path, 0.002, quality=dq.Quality(configuration=dq.Configuration(bins=4)))
    assert second.configuration == first.configuration
    assert second.progress < LEAST["published"]
    assert second.search == "fixed"


@BOTH_METHODS
def test_records_with_a_share_kept_read_back(tmp_path, method):
    records = after_a_restore(tmp_path, 0.002, quality=dq.Quality(method=method))
    with checkpointer(tmp_path, Drift().model) as ckpt:
        for record, back in zip(records, ckpt.records(), strict=True):
            assert back.progress == record.progress
            assert back.trials == record.trials
            assert back.to_json()["trials"][0]["progress"] == record.trials[0].progress
