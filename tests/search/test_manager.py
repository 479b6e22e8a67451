"""The configuration manager in a Checkpointer: every checkpoint is as small as its quality allows."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from movement import Movement
from searches import BOTH_METHODS, LATER_SEARCH, checkpointer, loss, model_of, run, training_of
from torch import nn
from training import bits, train

import dynaquant as dq
from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE

# Quality


@pytest.mark.parametrize(("evaluate", "max_degradation"), [(loss, 0.02), (loss, 0.2), (1.0, 0.0), (1.0, 0.002)])
@BOTH_METHODS
def test_no_checkpoint_degrades_by_more_than_is_allowed(tmp_path, evaluate, max_degradation, method):
    for record in run(tmp_path, evaluate, 3, quality=dq.Quality(max_degradation=max_degradation, method=method)):
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
        run(tmp_path / str(allowed), 1.0, 1, quality=dq.Quality(max_degradation=allowed, method=method))[0]
        .roles["weight"]
        .stored
        for allowed in (0.0001, 0.001, 0.01)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.5 * sizes[2]


@BOTH_METHODS
@pytest.mark.usefixtures("coarse_grids")
def test_with_higher_is_better_a_higher_metric_is_no_degradation(tmp_path, method):
    model, optimizer = training_of()
    train(model, optimizer, 30)
    options = {
        "evaluate": lambda scored: -loss(scored),
        "higher_is_better": True,
        "quality": dq.Quality(max_degradation=0.01, method=method),
    }
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        record = ckpt.save(1).result()
    quality = record.quality
    assert quality.original == pytest.approx(-loss(model))
    assert quality.degradation == pytest.approx((quality.original - quality.restored) / loss(model))
    assert quality.degradation <= record.limit
    assert len({trial.degradation > record.limit for trial in record.trials}) == 2


# How a configuration is found


def test_the_first_search_is_exhaustive_and_later_ones_search_the_neighbourhood(tmp_path):
    records = run(tmp_path, 1.0, 6, quality=dq.Quality(method="published", max_degradation=0.003))
    assert [record.search for record in records] == ["exhaustive"] + 5 * ["neighbourhood"]
    assert len(records[0].trials) > 4
    assert all(len(record.trials) <= 4 for record in records[1:])
    for before, after in pairwise(records):
        assert after.trials[0].configuration == before.configuration


@BOTH_METHODS
def test_no_configuration_is_evaluated_twice(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Movement(model, 1.0)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method)) as ckpt:
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
    """Every bit of the weights. The grid method quantizes moments, without a search."""
    model, optimizer = training_of()
    train(model, optimizer, 5)
    evaluate = Movement(model, 1e9)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method)) as ckpt:
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
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method)) as ckpt:
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
@pytest.mark.usefixtures("coarse_grids")
def test_unchanged_weights_need_no_new_search(tmp_path, method):
    model, optimizer = training_of()
    train(model, optimizer)
    evaluate = Movement(model, 1.0)
    with checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(max_degradation=0.003, method=method)
    ) as ckpt:
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
    options = {"evaluate": Movement(model, 1.0), "quality": dq.Quality(max_degradation=0.02, method=method)}
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step, ckpt.max_degradation in enumerate((0.02, 0.001)):
            record = ckpt.save(step).result()
            assert record.search != "lossless"
            assert record.quality.degradation <= ckpt.max_degradation


@pytest.mark.parametrize("configuration", [dq.Configuration(bins=4), dq.GridConfiguration(scale=-60)], ids=str)
def test_with_the_users_configuration_nothing_is_searched_for(tmp_path, configuration):
    for record in run(tmp_path, 1000.0, 2, quality=dq.Quality(configuration=configuration, method=None)):
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
    with checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(max_degradation=0.02, method=method)
    ) as ckpt:
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


def same_scale(first: object, second: object) -> bool:
    """Return whether configurations are the same, but for stochastic rounding."""
    if isinstance(first, dq.GridConfiguration):
        first = replace(first, dithered=False)
    return first == second


@BOTH_METHODS
def test_a_restored_training_starts_from_the_last_configuration(tmp_path, method):
    last = run(tmp_path, None, 2, steps=20, quality=dq.Quality(method=method))[-1]
    model, optimizer = training_of(1)
    with checkpointer(tmp_path, model, optimizer, quality=dq.Quality(method=method)) as ckpt:
        assert ckpt.restore() == 2
        train(model, optimizer, 5)
        record = ckpt.save(3).result()
    assert record.search == LATER_SEARCH[method]
    assert same_scale(record.trials[0].configuration, last.configuration)
    assert len(record.trials) <= 6  # two of them are larger than a failed one


@BOTH_METHODS
@pytest.mark.usefixtures("coarse_grids")
def test_search_results_of_each_limit_survive_a_restore(tmp_path, method):
    model, optimizer = training_of()
    with checkpointer(tmp_path, model, optimizer, quality=dq.Quality(method=method)) as ckpt:
        found = {}
        for step, ckpt.max_degradation in enumerate((0.05, 0.001)):
            train(model, optimizer)
            found[ckpt.max_degradation] = ckpt.save(step).result().configuration
    assert len(set(found.values())) == 2
    for seed, (allowed, configuration) in enumerate(found.items(), start=2):
        model, optimizer = training_of(seed)
        with checkpointer(
            tmp_path, model, optimizer, quality=dq.Quality(max_degradation=allowed, method=method)
        ) as ckpt:
            ckpt.restore(1)
            train(model, optimizer)
            first = ckpt.save(seed).result().trials[0].configuration
        if method == "published":
            assert first == configuration
        else:  # as the degradations at both limits say
            assert abs(first.scale - configuration.scale) <= SCALES_PER_OCTAVE


# Without a metric


def saved_without_metric(folder, optimizer_of, method) -> dq.Record:
    torch.manual_seed(0)
    model = model_of()
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer, 10)
    given = () if optimizer_of is plain_sgd else (optimizer,)
    with checkpointer(folder, model, *given, quality=dq.Quality(method=method, max_degradation=0.01)) as ckpt:
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
        (plain_sgd, "distortion"),  # the optimizer is not given to the Checkpointer
    ],
)
@BOTH_METHODS
@pytest.mark.usefixtures("coarse_grids")
def test_without_a_metric_the_distortion_decides(tmp_path, optimizer_of, judged_by, method):
    record = saved_without_metric(tmp_path, optimizer_of, method)
    assert record.judged_by == judged_by
    assert record.quality is None
    assert record.limit == 0.01
    degradations = {trial.configuration: trial.degradation for trial in record.trials}
    assert 0 < degradations[record.configuration] <= 0.01
    # The search has reached the limit: another candidate failed, or the first prediction was near the limit.
    assert max(degradations.values()) > (0.005 if method == "grid" else 0.01)
