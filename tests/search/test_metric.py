"""Metrics that are noisy or fail: what a checkpoint gets, and what its record says."""

import math
import random
import re
import statistics
from collections.abc import Callable

import pytest
import torch
from movement import Movement
from searches import BOTH_METHODS, checkpointer, gauss, loss, run, training_of
from torch import nn
from training import bits, train

import dynaquant as dq
from dynaquant.ranks.group import Group
from dynaquant.search.live_model import LiveModel
from dynaquant.search.metric import OriginalScore, UserMetric
from dynaquant.search.noise import Noise

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
@pytest.mark.usefixtures("coarse_grids")
def test_a_noisy_metric_lowers_the_limit_by_a_margin_and_is_noted(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Noisy(model, 0.1, noise=0.001)
    squares, freedom = 0.0, 0
    options = {"evaluate": evaluate, "quality": dq.Quality(max_degradation=0.01, method=method)}
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
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
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method)) as ckpt:
        record = ckpt.save(1).result()
    assert record.limit < 0
    assert record.search == "lossless" or record.quality.degradation < record.limit
    assert [note for note in record.notes if "evaluate on more batches" in note]


@BOTH_METHODS
def test_a_metric_with_extreme_values_does_not_prevent_a_save(tmp_path, method):
    values = iter([1.0, 1e200] * 50)
    record = run(tmp_path, lambda _: next(values), 1, quality=dq.Quality(method=method))[0]
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
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method)) as ckpt:
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
@pytest.mark.parametrize(
    "options",
    [
        {"quality": dq.Quality(method="grid")},
        {"quality": dq.Quality(method="published")},
        {"quality": dq.Quality(configuration=FIXED)},
    ],
    ids=str,
)
def test_a_metric_that_has_never_worked_is_an_error(tmp_path, caplog, fault, says, options):
    model, optimizer = training_of()
    order = torch.Generator().manual_seed(3)

    def evaluate(scored: nn.Module) -> float:
        torch.rand(2, generator=order)
        if evaluate.broken:
            return fault(scored)
        return 1.0 + 1e-5 * float(scored[1].weight.sum()) if scored[1].weight.any() else 2.0

    evaluate.broken = True
    options = {"evaluate": evaluate, "extras": {"order": order}} | options
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step in (1, 2):  # the second save raises, too
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
        assert ckpt.save(3).result().quality.degradation == pytest.approx(0, abs=1e-3)
        evaluate.broken = True
        record = ckpt.save(4).result()  # once the metric has worked, a failure does not end the training
        assert [note for note in record.notes if says in note]
    assert len(caplog.messages) == (options["quality"].configuration is None)


OUT_OF_MEMORY = [
    MemoryError("of the host"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
@pytest.mark.parametrize("at", [1, 6, 7], ids=["original", "first candidate", "second candidate"])
def test_running_out_of_memory_ends_the_save(tmp_path, coarse_grids, error, at):  # noqa: ARG001
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
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method="grid")) as ckpt:
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
@pytest.mark.usefixtures("coarse_grids")
def test_a_candidate_on_which_the_metric_fails_is_not_good_enough(tmp_path, fault, says, method):
    """Here it fails on weights with few different values."""
    model, optimizer = training_of()
    train(model, optimizer, 20)
    evaluate = Faulty(model, None, on_the_original=False)
    evaluate.fault = lambda m: fault(m) if len(m[1].weight.unique()) < 14 else 1.001
    options = {"evaluate": evaluate, "quality": dq.Quality(max_degradation=0.01, method=method)}
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        record = ckpt.save(1).result()
        back = ckpt.records()[0]
    failed = [trial for trial in record.trials if not math.isfinite(trial.degradation)]
    assert failed
    assert record.configuration not in [trial.configuration for trial in failed]
    assert record.quality.degradation == pytest.approx(0.001)
    assert all((says is None) == (trial.error is None) for trial in failed)
    assert all(says is None or says in trial.error for trial in failed)
    noted = {note for note in record.notes if "evaluate failed on a candidate" in note}
    assert noted == {f"evaluate failed on a candidate ({trial.error})" for trial in failed if trial.error}
    assert [trial.to_json() for trial in back.trials] == [trial.to_json() for trial in record.trials]


@BOTH_METHODS
def test_a_metric_that_fails_on_every_candidate_leaves_lossless(tmp_path, method):
    model, optimizer = training_of()
    evaluate = Faulty(model, fail, on_the_original=False)
    with checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method)) as ckpt:
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
            r"the best of \d+ candidates makes the metric worse by \d\S+, more than the 0.01 allowed; raise max_",
        ),
        (noisy, 0.01, r"the noise of the metric uses up the allowed 0.01; evaluate on more batches"),
        (zero_in_training, 0.01, r"the metric is exactly 0 in training, or infinite for"),
        (not_a_number_elsewhere, 0.01, r"evaluate fails, or is not finite, on every candidate"),
        (
            None,
            1e-12,
            r"the best of \d+ candidates is estimated to be worse by \d\S+, more than the 1e-12 allowed; .*evaluate",
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
    options = {"evaluate": evaluate, "quality": dq.Quality(max_degradation=allowed, method=method)}
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
    options = {"evaluate": Noisy(model, 1e9, noise=0.001), "quality": dq.Quality(max_degradation=0.01, method="grid")}
    with checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        record = ckpt.save(1).result()
    assert [note for note in record.notes if f"more than the {record.limit:.3g} that its noise leaves" in note]


# The metric of the weights in training


class MetricInTraining:
    """The metric of one training, with the memory of its saves."""

    def __init__(self, evaluate: Callable[[nn.Module], float]) -> None:
        self.metric, self.saves = UserMetric(LiveModel(nn.Linear(2, 2)), evaluate, False, Group()), 0
        self.noise, self.whole = Noise(), False

    def original(self) -> OriginalScore:
        self.saves += 1
        found = self.metric.original(self.noise, self.saves, self.whole)
        self.noise, self.whole = found.noise, found.whole
        return found


def test_the_score_of_the_weights_in_training_is_the_mean_of_their_evaluations():
    noisy, same = gauss(0.01), gauss(0.01)
    metric = MetricInTraining(lambda _: noisy())
    for count in (5, 2, 2):
        original = metric.original()
        assert original.score == pytest.approx(statistics.mean(same() for _ in range(count)), rel=1e-12)
        assert original.noise_margin == metric.noise.margin > 0
        assert original.problem is None


def test_the_score_of_a_metric_without_noise_keeps_every_bit():
    values = [0.1, 1 / 3, 1e300, 5e-324]
    for value in values:
        assert MetricInTraining(lambda _, value=value: value).original().score == value


def test_random_numbers_from_the_global_generators_are_not_noise():
    metric = MetricInTraining(lambda _: float(torch.rand(()) + random.random()))
    for _ in range(3):
        assert metric.original().noise_margin == 0


def test_a_metric_that_is_not_finite_is_a_problem_and_evaluated_five_times_once_it_is_finite_and_looks_stepped():
    values = iter([*2 * [math.nan], *5 * [2.0], 3.0])
    metric = MetricInTraining(lambda _: next(values))
    assert "not finite" in metric.original().problem
    assert (metric.original().score, metric.original().score) == (2.0, 3.0)


def test_a_metric_that_is_noisy_around_zero_is_a_problem():
    values = iter([0.5, -0.5, 0.0, 0.0, 0.0])
    assert "noisy around 0" in MetricInTraining(lambda _: next(values)).original().problem


def test_a_metric_that_needs_gradients_is_told_how_to_get_them(tmp_path):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.linspace(0, 1, 32)[:, None]

    def residual(model):
        points = inputs.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        return (slope - 1).square().mean()

    def with_gradients(model):
        with torch.enable_grad():
            return residual(model).item()

    residual(model).backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    without = dq.Checkpointer(tmp_path / "without", model, optimizer, evaluate=lambda model: residual(model).item())
    with without, pytest.raises(dq.EvaluateError, match=r"torch\.enable_grad\(\)"):
        without.save(1)
    with dq.Checkpointer(tmp_path / "with", model, optimizer, evaluate=with_gradients) as checkpointer:
        assert checkpointer.save(1).result().quality is not None
    assert all(before is p.grad for before, p in zip(gradients, model.parameters(), strict=True))
