"""The configuration manager in a Checkpointer: every checkpoint is as small as its quality allows."""

import json
import math
import random
import re
import shutil
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from movement import Movement
from rewritten import with_record
from torch import nn
from training import bits, train

import dynaquant as dq
from dynaquant.quantize.grid_weights import grid_weights
from dynaquant.quantize.kmeans_weights import kmeans_weights
from dynaquant.search.decision import Decision
from dynaquant.search.manager import ConfigurationManager
from dynaquant.state.roles import labels
from dynaquant.store.run import Run
from dynaquant.training.ranks import Group


def model_of() -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 40))


BOTH_METHODS = pytest.mark.parametrize("method", ["grid", "published"])
LATER_SEARCH = {"grid": "scale", "published": "neighbourhood"}


def training_of(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def checkpointer(folder, model: nn.Module, optimizer=None, **options) -> dq.Checkpointer:
    """A Checkpointer of the published method, unless ``method`` says otherwise."""
    return dq.Checkpointer(folder, model, optimizer, **{"method": "published"} | options)


def loss(model: nn.Module) -> float:
    return nn.functional.cross_entropy(model.eval()(torch.arange(40)), torch.arange(40)).item()


def run(folder, evaluate, saves: int, steps: int = 5, **options) -> list[dq.Record]:
    """Trains and saves every few steps. Returns the records."""
    model, optimizer = training_of()
    if isinstance(evaluate, int | float):
        evaluate = Movement(model, evaluate)
    records = []
    with checkpointer(folder, model, optimizer, evaluate=evaluate, **options) as ckpt:
        for step in range(1, saves + 1):
            train(model, optimizer, steps)
            if isinstance(evaluate, Movement):
                evaluate.remember()
            records.append(ckpt.save(step).result())
    return records


# Quality


@pytest.mark.parametrize(("evaluate", "max_degradation"), [(loss, 0.02), (loss, 0.2), (1.0, 0.0), (1.0, 0.002)])
@BOTH_METHODS
def test_no_checkpoint_degrades_by_more_than_is_allowed(tmp_path, evaluate, max_degradation, method):
    for record in run(tmp_path, evaluate, 3, max_degradation=max_degradation, method=method):
        assert record.limit == max_degradation
        assert record.judged_by == "evaluate"
        if record.search != "lossless":
            assert record.quality.degradation <= record.limit
            chosen = next(trial for trial in record.trials if trial.configuration == record.configuration)
            assert chosen.degradation == record.quality.degradation
            assert chosen.predicted == (None if method == "grid" else round(record.predicted))


@BOTH_METHODS
def test_a_larger_allowance_makes_smaller_checkpoints(tmp_path, method):
    sizes = [
        run(tmp_path / str(allowed), 1.0, 1, max_degradation=allowed, method=method)[0].roles["weight"].stored
        for allowed in (0.0001, 0.001, 0.01)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.5 * sizes[2]


@BOTH_METHODS
def test_with_higher_is_better_a_higher_metric_is_no_degradation(tmp_path, method):
    model, optimizer = training_of()
    train(model, optimizer, 30)
    with checkpointer(
        tmp_path, model, optimizer, evaluate=lambda scored: -loss(scored), higher_is_better=True, method=method
    ) as ckpt:
        record = ckpt.save(1).result()
    quality = record.quality
    assert quality.original == pytest.approx(-loss(model))
    assert quality.degradation == pytest.approx((quality.original - quality.restored) / loss(model))
    assert quality.degradation <= record.limit
    assert len({trial.degradation > record.limit for trial in record.trials}) == 2


# How a configuration is found


def test_the_first_search_is_exhaustive_and_later_ones_search_the_neighbourhood(tmp_path):
    records = run(tmp_path, 1.0, 6, max_degradation=0.003)
    assert [record.search for record in records] == ["exhaustive"] + 5 * ["neighbourhood"]
    assert len(records[0].trials) > 4
    assert all(len(record.trials) <= 4 for record in records[1:])
    for before, after in pairwise(records):
        assert after.trials[0].configuration == before.configuration


@BOTH_METHODS
def test_no_configuration_is_evaluated_twice(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Movement(model, 1.0)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        for step, of_the_original in enumerate((5, 1, 1)):
            train(model, optimizer)
            evaluate.remember()
            evaluate.calls = 0
            record = ckpt.save(step).result()
            assert evaluate.calls == of_the_original + len(record.trials)
            assert len({trial.configuration for trial in record.trials}) == len(record.trials)


@pytest.mark.parametrize(
    ("strictness", "search", "bins"),
    [
        (0.001, "exhaustive", 4),
        (10, "more bins", 64),
        (30, "more bins", 128),
        (200, "more bins", 254),
        (1e9, "lossless", 0),
    ],
)
def test_if_no_published_configuration_is_good_enough_more_bins_are_tried_then_lossless(
    tmp_path, strictness, search, bins
):
    first, second = run(tmp_path, strictness, 2)
    assert first.search == search
    assert (first.configuration.bins if first.configuration else 0) == bins
    if search != "exhaustive":
        tried = [trial.configuration.bins for trial in first.trials]
        beyond = [n for n in tried if n > 32]
        assert beyond == [64, 128, 254][: len(beyond)]
        assert tried[: -len(beyond)] == [n for n in tried if n <= 32]
    # Configurations that failed before are not tried again.
    assert second.search == ("lossless" if search == "lossless" else "neighbourhood")
    assert {trial.configuration.bins for trial in second.trials} == {bins or 254}


@BOTH_METHODS
def test_a_lossless_checkpoint_restores_every_bit(tmp_path, method):
    """Of the weights. Moments are quantized without a search, by the grid method only."""
    model, optimizer = training_of()
    train(model, optimizer, 5)
    evaluate = Movement(model, 1e9)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        for step in (1, 2):
            train(model, optimizer, 5)
            evaluate.remember()
            record = ckpt.save(step).result()
            assert (record.search, record.configuration, record.quality) == ("lossless", None, None)
    other = training_of(1)
    with checkpointer(tmp_path, *other) as ckpt:
        assert ckpt.restore() == 2
    assert bits(other[0].state_dict()) == bits(model.state_dict())
    assert (bits(other[1].state_dict()) == bits(optimizer.state_dict())) == (method == "published")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grid", ["lossless", "scale", "lossless", "scale"]),
        ("published", ["lossless", "more bins", "lossless", "neighbourhood"]),
    ],
)
def test_after_a_lossless_checkpoint_a_milder_metric_quantizes_again(tmp_path, method, expected):
    model, optimizer = training_of()
    evaluate = Movement(model, 1e9)
    searches = []
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        for step, evaluate.strictness in enumerate((1e9, 100, 1e9, 1)):
            train(model, optimizer, 3)
            evaluate.remember()
            record = ckpt.save(step).result()
            searches.append(record.search)
            assert (record.quality is None) == (record.search == "lossless")
    assert searches == expected


def test_a_model_without_embeddings_has_a_smaller_space(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))
    with checkpointer(tmp_path, model, evaluate=Movement(model, 1.0)) as ckpt:
        record = ckpt.save(1).result()
    assert record.search == "exhaustive"
    assert record.quality.degradation <= record.limit
    assert {trial.configuration.embedding_bins for trial in record.trials} == {32}


@BOTH_METHODS
def test_unchanged_weights_need_no_new_search(tmp_path, method):
    model, optimizer = training_of()
    train(model, optimizer)
    evaluate = Movement(model, 1.0)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, max_degradation=0.003, method=method) as ckpt:
        first, second = (ckpt.save(step).result() for step in (1, 2))
        assert len(first.trials) > len(second.trials) == 1
        assert (second.quality, second.configuration) == (first.quality, first.configuration)
        assert bits(dq.load(tmp_path, 2)["model"]) == bits(dq.load(tmp_path, 1)["model"])
        train(model, optimizer)
        evaluate.remember()
        third = ckpt.save(3).result()
    assert third.search == LATER_SEARCH[method]
    assert third.trials[0].configuration == first.configuration


@BOTH_METHODS
def test_unchanged_weights_are_quantized_again_if_less_is_allowed(tmp_path, method):
    model, optimizer = training_of()
    train(model, optimizer)
    options = {"evaluate": Movement(model, 1.0), "max_degradation": 0.02, "method": method}
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step, ckpt.max_degradation in enumerate((0.02, 0.001)):
            record = ckpt.save(step).result()
            assert record.search != "lossless"
            assert record.quality.degradation <= ckpt.max_degradation


@pytest.mark.parametrize("configuration", [dq.Configuration(bins=4), dq.GridConfiguration(scale=-60)], ids=str)
def test_with_the_users_configuration_nothing_is_searched_for(tmp_path, configuration):
    for record in run(tmp_path, 1000.0, 2, configuration=configuration, method=None):
        assert record.search == "fixed"
        assert record.configuration == configuration
        assert record.limit is None
        assert record.quality.degradation > 0.01
        assert [trial.configuration for trial in record.trials] == [configuration]


# A changed max_degradation


@BOTH_METHODS
def test_a_lower_max_degradation_holds_from_the_next_save_on(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Movement(model, 1.0)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, max_degradation=0.02, method=method) as ckpt:
        for step, allowed in enumerate((0.02, 0.02, 0.001, 0.001, 0.00005)):
            ckpt.max_degradation = allowed
            train(model, optimizer, 3)
            evaluate.remember()
            record = ckpt.save(step).result()
            assert record.limit == allowed
            assert record.quality.degradation <= allowed


def test_a_max_degradation_higher_than_all_before_starts_an_exhaustive_search(tmp_path):
    model, optimizer = training_of()
    evaluate = Movement(model, 1.0)
    searches, bins = [], []
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        for step, allowed in enumerate((0.003, 0.003, 0.02, 0.02, 0.003, 0.02)):
            ckpt.max_degradation = allowed
            train(model, optimizer)
            evaluate.remember()
            record = ckpt.save(step).result()
            searches.append(record.search)
            bins.append(record.configuration.bins)
    assert searches == ["exhaustive", "neighbourhood", "exhaustive", "neighbourhood", "neighbourhood", "neighbourhood"]
    assert bins[0] == bins[1] == bins[4] > bins[2] == bins[3] == bins[5]


# After a restore


@BOTH_METHODS
def test_a_restored_training_starts_from_the_last_configuration(tmp_path, method):
    last = run(tmp_path, None, 2, steps=20, method=method)[-1]
    model, optimizer = training_of(1)
    with checkpointer(tmp_path, model, optimizer, method=method) as ckpt:
        assert ckpt.restore() == 2
        train(model, optimizer, 5)
        record = ckpt.save(3).result()
    assert record.search == LATER_SEARCH[method]
    assert record.trials[0].configuration == last.configuration
    assert len(record.trials) <= 6  # two of them are larger than a failed one


@BOTH_METHODS
def test_what_was_found_for_each_limit_survives_a_restore(tmp_path, method):
    model, optimizer = training_of()
    with checkpointer(tmp_path, model, optimizer, method=method) as ckpt:
        found = {}
        for step, ckpt.max_degradation in enumerate((0.05, 0.001)):
            train(model, optimizer)
            found[ckpt.max_degradation] = ckpt.save(step).result().configuration
    assert len(set(found.values())) == 2
    for seed, (allowed, configuration) in enumerate(found.items(), start=2):
        model, optimizer = training_of(seed)
        with checkpointer(tmp_path, model, optimizer, max_degradation=allowed, method=method) as ckpt:
            ckpt.restore(1)
            train(model, optimizer)
            assert ckpt.save(seed).result().trials[0].configuration == configuration


# Metrics that are noisy or fail


class Noisy(Movement):
    """The metric with noise. Keeps what it returned."""

    def __init__(self, model: nn.Module, strictness: float, noise: float) -> None:
        super().__init__(model, strictness)
        self.noise, self.draw, self.returned = noise, random.Random(1), []

    def __call__(self, model: nn.Module) -> float:
        self.returned.append(super().__call__(model) + self.noise * self.draw.gauss(0, 1))
        return self.returned[-1]


@BOTH_METHODS
def test_a_noisy_metric_lowers_the_limit_by_a_margin_and_is_noted(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Noisy(model, 0.1, noise=0.001)
    squares, freedom = 0.0, 0
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        for step, of_the_original in enumerate((5, 2, 2, 2)):
            train(model, optimizer)
            evaluate.remember()
            evaluate.returned.clear()
            record = ckpt.save(step).result()
            scores = evaluate.returned[:of_the_original]
            mean = statistics.mean(scores)
            squares += sum((score / mean - 1) ** 2 for score in scores)
            freedom += of_the_original - 1
            assert len(evaluate.returned) == of_the_original + len(record.trials)
            assert record.limit == pytest.approx(0.01 - 2 * math.sqrt(2 * squares / freedom))
            assert 0 < record.limit < 0.01
            assert record.quality.original == pytest.approx(mean)
            assert record.quality.degradation <= record.limit
            assert [note for note in record.notes if "the metric is noisy" in note]


@BOTH_METHODS
def test_noise_larger_than_max_degradation_leaves_only_lossless(tmp_path, method):
    model, optimizer = training_of()
    train(model, optimizer)
    evaluate = Noisy(model, 0.1, noise=0.2)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        record = ckpt.save(1).result()
    assert record.limit < 0
    assert record.search == "lossless" or record.quality.degradation < record.limit
    assert [note for note in record.notes if "evaluate on more batches" in note]


@BOTH_METHODS
def test_a_metric_with_extreme_values_does_not_prevent_a_save(tmp_path, method):
    values = iter([1.0, 1e200] * 50)
    record = run(tmp_path, lambda _: next(values), 1, method=method)[0]
    assert record.search == "lossless"
    assert math.isfinite(record.limit)


class Faulty(Movement):
    """The metric, but calls ``fault`` on the weights in training, or on all others if not ``on_the_original``."""

    def __init__(self, model: nn.Module, fault, on_the_original: bool) -> None:
        super().__init__(model, 1.0)
        self.fault, self.on_the_original = fault, on_the_original
        self.broken = True

    def __call__(self, model: nn.Module) -> float:
        if self.broken and (self.moved(model) == 0) == self.on_the_original:
            return self.fault(model)
        return super().__call__(model)


def fail(_: nn.Module) -> float:
    raise ZeroDivisionError("no tokens")


FIXED = dq.GridConfiguration(scale=-60)
RAISES = (fail, "ZeroDivisionError: no tokens")
OTHER_FAULTS = [
    (lambda _: "high", "'high'; it must return one number"),
    (lambda _: math.nan, None),
    (lambda _: -math.inf, None),
]
NAMES = ["raises", "no number", "nan", "infinite"]


@pytest.mark.parametrize(
    ("fault", "says", "at"),
    [(*OTHER_FAULTS[1], 1), *((*fault, 2) for fault in (RAISES, *OTHER_FAULTS))],
    ids=["nan at first", *NAMES],
)
@BOTH_METHODS
def test_if_the_metric_fails_on_the_weights_in_training_the_checkpoint_is_lossless(
    tmp_path, caplog, fault, says, at, method
):
    model, optimizer = training_of()
    evaluate = Faulty(model, fault, on_the_original=True)
    searches = []
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            evaluate.remember()
            evaluate.broken = step == at
            record = ckpt.save(step).result()
            searches.append(record.search)
            if step == at:
                assert (record.quality, record.configuration, record.judged_by, record.trials) == (None, None, None, [])
                noted = [note for note in record.notes if (says or "not finite") in note]
                assert caplog.messages == noted  # logged at once: the file is many times larger
                assert len(noted) == 1
                assert bits(dq.load(tmp_path)["model"]) == bits(model.state_dict())
    expected = ["scale", "scale"] if method == "grid" else ["exhaustive", "neighbourhood"]
    expected.insert(at - 1, "lossless")
    assert searches == expected


@pytest.mark.parametrize(("fault", "says"), [RAISES, OTHER_FAULTS[0]], ids=NAMES[:2])
@pytest.mark.parametrize("options", [{"method": "grid"}, {"method": "published"}, {"configuration": FIXED}], ids=str)
def test_a_metric_that_has_never_worked_is_an_error(tmp_path, caplog, fault, says, options):
    model, optimizer = training_of()
    order = torch.Generator().manual_seed(3)

    def evaluate(scored: nn.Module) -> float:
        torch.rand(2, generator=order)
        return fault(scored) if evaluate.broken else 1.0

    evaluate.broken = True
    options = {"evaluate": evaluate, "extras": {"order": order}} | options
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step in (1, 2):  # the second time, too
            train(model, optimizer)
            before = bits([model.state_dict(), optimizer.state_dict(), order.get_state(), torch.get_rng_state()])
            files = sorted(tmp_path.iterdir())
            with pytest.raises(dq.EvaluateError, match=re.escape(says)) as caught:
                ckpt.save(step)
            assert caught.value.__cause__ is not None
            after = bits([model.state_dict(), optimizer.state_dict(), order.get_state(), torch.get_rng_state()])
            assert after == before
            assert sorted(tmp_path.iterdir()) == files
        evaluate.broken = False
        assert ckpt.save(3).result().quality.degradation == 0
        evaluate.broken = True
        record = ckpt.save(4).result()  # once the metric has worked, a failure does not end the training
        assert [note for note in record.notes if says in note]
    assert len(caplog.messages) == ("configuration" not in options)


OUT_OF_MEMORY = [
    MemoryError("of the host"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
@pytest.mark.parametrize("at", [1, 6, 7], ids=["original", "first candidate", "second candidate"])
def test_running_out_of_memory_ends_the_save(tmp_path, error, at):
    model, optimizer = training_of()
    order = torch.Generator().manual_seed(3)
    train(model, optimizer, 20)
    metric = Movement(model, 1.0)

    def evaluate(scored: nn.Module) -> float:
        torch.rand(2, generator=order)
        random.random()
        if metric.calls == at - 1:
            metric.calls += 1
            raise error
        return metric(scored)

    def state() -> object:
        tensors = [model.state_dict(), optimizer.state_dict(), order.get_state(), torch.get_rng_state()]
        return bits(tensors), random.getstate(), [id(p) for p in model.parameters()], model.training

    with dq.Checkpointer(tmp_path, model, optimizer, extras={"order": order}, evaluate=evaluate) as ckpt:
        before, files = state(), sorted(tmp_path.iterdir())
        with pytest.raises(type(error), match=re.escape(str(error))) as caught:
            ckpt.save(1)
        assert caught.value is error
        assert "while dynaquant called evaluate; nothing was saved" in caught.value.__notes__[-1]
        assert (state(), sorted(tmp_path.iterdir())) == (before, files)
        assert ckpt.save(1).result().search == "scale"  # memory was short for a moment only


def test_a_real_lack_of_host_memory_is_recognised(tmp_path):
    model, optimizer = training_of()

    def evaluate(scored: nn.Module) -> float:
        return float(torch.empty(10**16).sum()) if evaluate.greedy else loss(scored)

    evaluate.greedy = False
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method="grid") as ckpt:
        ckpt.save(1).result()
        evaluate.greedy = True
        with pytest.raises(RuntimeError, match="memory"):
            ckpt.save(2)


def test_an_interrupt_in_evaluate_ends_the_save_and_resets_the_generators(tmp_path):
    model, optimizer = training_of()
    order = torch.Generator().manual_seed(3)
    calls = []

    def evaluate(_: nn.Module) -> float:
        torch.rand(2, generator=order)
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return 1.0

    with dq.Checkpointer(tmp_path, model, optimizer, extras={"order": order}, evaluate=evaluate) as ckpt:
        before = bits([model.state_dict(), order.get_state()])
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1)
        assert bits([model.state_dict(), order.get_state()]) == before


@pytest.mark.parametrize(("fault", "says"), [RAISES, *OTHER_FAULTS], ids=NAMES)
@BOTH_METHODS
def test_a_candidate_on_which_the_metric_fails_is_not_good_enough(tmp_path, fault, says, method):
    """Here it fails on weights with few different values."""
    model, optimizer = training_of()
    train(model, optimizer, 20)
    evaluate = Faulty(model, None, on_the_original=False)
    evaluate.fault = lambda m: fault(m) if len(m[1].weight.unique()) < 14 else 1.001
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        record = ckpt.save(1).result()
        back = ckpt.records()[0]
    failed = [trial for trial in record.trials if not math.isfinite(trial.degradation)]
    assert failed
    assert record.configuration not in [trial.configuration for trial in failed]
    assert record.quality.degradation == pytest.approx(0.001)
    assert all((says is None) == (trial.error is None) for trial in failed)
    assert all(says is None or says in trial.error for trial in failed)
    noted = [note for note in record.notes if "evaluate failed on a candidate" in note]
    assert len(noted) == len({trial.error for trial in failed} - {None})
    assert [trial.to_json() for trial in back.trials] == [trial.to_json() for trial in record.trials]


@BOTH_METHODS
def test_a_metric_that_fails_on_every_candidate_leaves_lossless(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Faulty(model, fail, on_the_original=False)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        record = ckpt.save(1).result()
    assert record.search == "lossless"
    assert all(trial.error == "ZeroDivisionError: no tokens" for trial in record.trials)
    if method == "published":
        assert record.trials[-1].configuration.bins == 254
    else:
        assert record.trials[-1].configuration.scale == min(trial.configuration.scale for trial in record.trials)


# Reasons for a lossless checkpoint


def strict(model: nn.Module) -> Movement:
    return Movement(model, 1e9)


def noisy(model: nn.Module) -> Movement:
    return Noisy(model, 0.1, noise=0.2)


def zero_in_training(model: nn.Module):
    return Movement(model, 1.0).moved


def not_a_number_elsewhere(model: nn.Module) -> Movement:
    return Faulty(model, lambda _: math.nan, on_the_original=False)


@pytest.mark.parametrize(
    ("metric_of", "allowed", "says"),
    [
        (
            strict,
            0.01,
            r"the best of \d+ candidates makes the metric worse by \d\S+, beyond the 0.01 allowed; allow more",
        ),
        (noisy, 0.01, r"the noise of the metric takes all of the 0.01 allowed; evaluate on more batches"),
        (zero_in_training, 0.01, r"the metric is exactly 0 in training, or infinite for"),
        (not_a_number_elsewhere, 0.01, r"evaluate fails, or is not finite, on every candidate"),
        (
            None,
            1e-12,
            r"the best of \d+ candidates is estimated to be worse by \d\S+, beyond the 1e-12 allowed; .*give evaluate",
        ),
    ],
    ids=["strict", "noisy", "zero", "not finite", "no metric"],
)
@BOTH_METHODS
def test_a_warning_and_a_note_give_the_reason_for_a_lossless_checkpoint(
    tmp_path, caplog, metric_of, allowed, says, method
):
    model, optimizer = training_of()
    train(model, optimizer, 5)
    evaluate = None if metric_of is None else metric_of(model)
    options = {"evaluate": evaluate, "max_degradation": allowed, "method": method}
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step in (1, 2):
            record = ckpt.save(step).result()
            told = [note for note in record.notes if "stored exactly and the file is many times larger; " in note]
            assert record.search == "lossless"
            assert caplog.messages == told
            assert len(told) == 1
            assert re.search(says, told[0])
            caplog.clear()


def test_the_note_says_if_noise_leaves_too_little(tmp_path):
    model, optimizer = training_of()
    train(model, optimizer)
    with checkpointer(tmp_path, model, optimizer, evaluate=Noisy(model, 1e9, noise=0.001), method="grid") as ckpt:
        record = ckpt.save(1).result()
    assert [note for note in record.notes if f"beyond the {record.limit:.3g} left by its noise" in note]


# Without a metric


def saved_without_metric(folder, optimizer_of, method) -> dq.Record:
    torch.manual_seed(0)
    model = model_of()
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer, 10)
    given = () if optimizer_of is plain_sgd else (optimizer,)
    with checkpointer(folder, model, *given, method=method) as ckpt:
        if given:
            train(model, optimizer, 2)
        return ckpt.save(1).result()


def plain_sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sgd_with_momentum(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("optimizer_of", "judged_by"),
    [
        (torch.optim.AdamW, "fisher distortion"),
        (sgd_with_momentum, "fisher distortion"),  # from recorded gradients
        (plain_sgd, "distortion"),  # not given to the Checkpointer
    ],
)
@BOTH_METHODS
def test_without_a_metric_the_distortion_decides(tmp_path, optimizer_of, judged_by, method):
    record = saved_without_metric(tmp_path, optimizer_of, method)
    assert record.judged_by == judged_by
    assert record.quality is None
    assert record.limit == 0.01
    degradations = {trial.configuration: trial.degradation for trial in record.trials}
    assert 0 < degradations[record.configuration] <= 0.01
    # The search has reached the limit: another candidate failed, or the first prediction was near the limit.
    assert max(degradations.values()) > (0.005 if method == "grid" else 0.01)


# Records


@pytest.mark.parametrize("evaluate", [loss, None, 100.0, 1e9], ids=["loss", "no metric", "more bins", "lossless"])
@BOTH_METHODS
def test_records_read_back_equal_those_of_save_except_for_the_time_of_writing(tmp_path, evaluate, method):
    records = run(tmp_path, evaluate, 2, method=method)
    with checkpointer(tmp_path, *training_of()) as ckpt:
        read = ckpt.records()
    for record, back in zip(records, read, strict=True):
        assert set(record.seconds) - set(back.seconds) == {"write"}
        assert replace(record, seconds=back.seconds) == back
        assert json.loads(json.dumps(back.to_json(), allow_nan=False))["search"] == record.search
        assert all(trial.seconds > 0 for trial in back.trials)
        if back.predicted is not None:
            assert 0.2 < back.predicted / back.roles["weight"].stored < 5


@pytest.fixture(scope="module")
def run_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run(folder, loss, 1)
    return folder


def resumed(folder, run_of_one, **changes) -> tuple[dq.Checkpointer, nn.Module, torch.optim.Optimizer]:
    """Restores a training from a checkpoint with a changed record."""
    shutil.copytree(run_of_one, folder, dirs_exist_ok=True)
    with_record(Run(folder).path(1), **changes)
    model, optimizer = training_of(1)
    ckpt = checkpointer(folder, model, optimizer, evaluate=loss, every="auto")
    assert ckpt.restore() == 1
    return ckpt, model, optimizer


@pytest.mark.parametrize("search", [None, {"history": [7]}, {"history": {"-7": {"bins": "16"}}}], ids=str)
def test_an_invalid_search_in_a_restored_record_starts_a_new_one(tmp_path, run_of_one, search):
    ckpt, model, optimizer = resumed(tmp_path, run_of_one, search=search)
    with ckpt:
        train(model, optimizer, 5)
        record = ckpt.save(2).result()
    assert record.search in ("exhaustive", "more bins")
    assert len(record.trials) > 4


@pytest.mark.parametrize("interval", ["often", -5, 0, 2.5, []])
def test_an_invalid_interval_in_a_restored_record_is_ignored(tmp_path, run_of_one, interval):
    with resumed(tmp_path, run_of_one, interval=interval)[0] as ckpt:
        assert not ckpt.due(2)
        assert ckpt.due(1 + 50)


@pytest.mark.parametrize(
    "changes",
    [
        {"quality": {"restored": 10**400}},
        {"search": {"trials": [7]}},
        {
            "search": {
                "trials": [
                    {
                        "configuration": {},
                        "predicted": 10**400,
                        "degradation": 0,
                        "progress": 1,
                        "seconds": 0,
                        "error": None,
                    }
                ]
            }
        },
        {"configuration": {"bins": 0}},
        {"configuration": {"scale": "fine"}},
    ],
    ids=["quality", "trials", "predicted", "bins", "scale"],
)
def test_reading_an_invalid_record_raises_an_error(tmp_path, run_of_one, changes):
    with (
        resumed(tmp_path, run_of_one, **changes)[0] as ckpt,
        pytest.raises(dq.CheckpointError, match="its record of the save cannot be understood"),
    ):
        ckpt.records()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
VALUES = st.sampled_from([4, 5.5, 300, 0, -1, 0.3, math.nan, True, None, "magnitude", "sensitivity", "both", [], {}])
KNOBS = st.dictionaries(
    st.sampled_from(["bins", "embedding_bins", "pruned", "pruning_metric", "protected", "protection_metric", "x"]),
    VALUES | JSON,
    max_size=4,
) | st.dictionaries(st.sampled_from(["scale", "dithered", "x"]), VALUES | JSON, max_size=2)
HISTORIES = st.dictionaries(st.integers(-40, 5).map(str) | st.text(max_size=3), KNOBS | JSON, max_size=3)
RECORDS = st.fixed_dictionaries({}, optional={"search": st.fixed_dictionaries({"history": HISTORIES | JSON}) | JSON})


def decide(record, method: str) -> tuple[Decision, ConfigurationManager]:
    """Returns the decision of a manager that resumes from a record, for a model with 30 weights, and the manager."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    weights = {"model.weight": model.weight.detach()}
    if method == "grid":
        ready = grid_weights(weights, {}, {}, 0)
    else:
        ready = kmeans_weights(weights, labels(weights, {"model": model}, {}), {})
    manager = ConfigurationManager(model, Movement(model, 1.0), False, 0.01, None, Group())
    manager.resume(record, {})
    return manager.decide(ready, {}, {}), manager


@BOTH_METHODS
@given(record=RECORDS)
@settings(max_examples=20)
def test_whatever_a_record_contains_the_next_decision_keeps_to_the_limit(method, record):
    decision, manager = decide(record, method)
    assert decision.limit <= 0.01
    assert decision.search == "lossless" or decision.quality.degradation <= decision.limit
    assert json.loads(json.dumps(manager.history.to_json(), allow_nan=False))


@pytest.mark.parametrize(
    "history",
    [
        None,
        {"-7": None},
        {"-7": {"bins": 10**400}},
        {"-7": {"bins": 16, "colour": 1}},
        {"-7": {"pruned": -1}},
        {"-7": {"pruned": math.nan}},
        {"-7": {"pruning_metric": ["magnitude"]}},
        {"often": {"bins": 16}},
        {"": {}},
        {"1e3": {}},
        {"-7": {"bins": 16}, "-8": {"bins": 0}},
    ],
    ids=str,
)
def test_an_invalid_history_starts_a_new_search(history):
    assert decide({"search": {"history": history}}, "published")[0].search == "exhaustive"


@pytest.mark.parametrize(
    "history",
    [
        {"-7": {"scale": "fine"}},
        {"-7": {"scale": None}},
        {"-7": {"scale": [16]}},
        {"-7": {"scale": 0.5}},
        {"-7": {"scale": math.nan}},
        {"-7": {"scale": 16, "colour": 1}},
        {"-7": {"scale": 16}, "-8": {"scale": []}},
        {"often": {"scale": 16}},
    ],
    ids=lambda history: str(history)[:40],
)
def test_an_invalid_history_of_scale_exponents_starts_a_new_search(history):
    found, afresh = (decide({"search": {"history": past}}, "grid")[0] for past in (history, None))
    assert [trial.configuration for trial in found.trials] == [trial.configuration for trial in afresh.trials]
