"""Metrics on batches: candidates are given up after a few, and what is chosen is evaluated on all of them."""

import math
import random
from functools import partial

import pytest
import torch
from searches import BOTH_METHODS, training_of
from torch import nn
from torch.nn import functional as F
from training import bits, train

import dynaquant as dq
from dynaquant.search.evaluation import of_several, on_batches

BATCHES = [torch.randint(40, (16,), generator=torch.Generator().manual_seed(i)) for i in range(20)]


def cross_entropy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch)


class Counting:
    """A loss function that counts, since it was last asked, on how many batches models were evaluated."""

    def __init__(self, loss_fn=cross_entropy) -> None:
        self.loss_fn, self.calls = loss_fn, 0

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor | float:
        self.calls += 1
        return self.loss_fn(model, batch)

    def equivalents(self) -> float:
        found, self.calls = self.calls / len(BATCHES), 0
        return found


def run(folder, loss_fn, saves: int, steps: int = 5, **options) -> list[tuple[dq.Record, float]]:
    """Train and save. Returns the records, and what each save has spent as counted by the loss function."""
    model, optimizer = training_of()
    counting, found = Counting(loss_fn), []
    with dq.Checkpointer(folder, model, optimizer, evaluate=dq.LossOn(BATCHES, counting), **options) as ckpt:
        for step in range(1, saves + 1):
            train(model, optimizer, steps)
            record = ckpt.save(step).result()
            found.append((record, counting.equivalents()))
    return found


# What is spent


@BOTH_METHODS
@pytest.mark.parametrize("max_degradation", [0.0005, 0.02])
def test_the_record_says_what_was_spent(tmp_path, method, max_degradation):
    found = run(tmp_path, cross_entropy, 6, quality=dq.Quality(method=method, max_degradation=max_degradation))
    for record, counted in found:
        assert record.equivalents == pytest.approx(counted)
        assert record.evaluations == len(record.trials)
        assert record.to_json()["equivalents"] == record.equivalents
    assert min(counted for _, counted in found) >= 2
    with dq.Checkpointer(tmp_path, *training_of()) as ckpt:
        assert [each.equivalents for each in ckpt.records()] == [each.equivalents for each, _ in found]


@BOTH_METHODS
def test_the_chosen_candidate_is_evaluated_on_all_batches_and_stays_within_the_limit(tmp_path, method):
    shares = []
    model, optimizer = training_of()
    evaluate = dq.LossOn(BATCHES, cross_entropy)
    with dq.Checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method, max_degradation=0.003)
    ) as ckpt:
        for step in range(1, 9):
            train(model, optimizer, 5)
            original = evaluate(model)
            record = ckpt.save(step).result()
            chosen = next(trial for trial in record.trials if trial.configuration == record.configuration)
            assert chosen.share == 1
            restored = training_of()[0]
            restored.load_state_dict(dq.load(tmp_path, step=step)["model"])
            worse = (evaluate(restored) - original) / original
            assert record.quality.degradation == pytest.approx(worse, abs=1e-12)
            assert worse <= record.limit
            shares += [trial.share for trial in record.trials if trial != chosen]
    assert min(shares) < 0.3
    assert sum(share < 1 for share in shares) > len(shares) / 3


@BOTH_METHODS
@pytest.mark.usefixtures("coarse_grids")
def test_a_metric_of_one_function_costs_more_and_finds_the_same_at_the_first_save(tmp_path, method):
    options = {"quality": dq.Quality(method=method, max_degradation=0.03)}
    on_batches, counted = run(tmp_path / "batches", cross_entropy, 1, steps=20, **options)[0]
    model, optimizer = training_of()
    as_a_whole = partial(dq.LossOn.__call__, dq.LossOn(BATCHES, cross_entropy))
    with dq.Checkpointer(tmp_path / "one", model, optimizer, evaluate=as_a_whole, **options) as ckpt:
        train(model, optimizer, 20)
        whole = ckpt.save(1).result()
    assert whole.equivalents == 2 + len(whole.trials)
    assert all(trial.share == 1 for trial in whole.trials)
    assert on_batches.equivalents == pytest.approx(counted)
    assert counted < (0.75 if method == "published" else 1) * whole.equivalents
    assert on_batches.quality.original == whole.quality.original
    assert on_batches.quality.degradation == pytest.approx(whole.quality.degradation, rel=1)


def test_the_weights_in_training_are_evaluated_once_and_on_few_batches_again(tmp_path):
    """On three at the first save, on one at the tenth after it and after a restore."""
    model, optimizer = training_of()
    in_training, spent = [], []

    def on_the_original(scored: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        spent[-1] += all(map(torch.equal, scored.parameters(), in_training))
        return cross_entropy(scored, batch)

    def save(ckpt: dq.Checkpointer, model: nn.Module, step: int) -> None:
        in_training[:] = [parameter.detach().clone() for parameter in model.parameters()]
        spent.append(0)
        ckpt.save(step).result()

    evaluate = dq.LossOn(BATCHES, on_the_original)
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        for step in range(12):
            train(model, optimizer)
            save(ckpt, model, step)
    other, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, other, optimizer, evaluate=evaluate) as ckpt:
        ckpt.restore()
        train(other, optimizer)
        save(ckpt, other, 20)
    assert spent == [23, *9 * [20], 21, 20, 21]


def test_without_a_metric_nothing_was_spent(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        train(model, optimizer)
        assert ckpt.save(1).result().equivalents == 0


def test_a_given_configuration_is_measured_on_all_batches(tmp_path):
    record, counted = run(
        tmp_path, cross_entropy, 1, steps=40, quality=dq.Quality(configuration=dq.GridConfiguration(scale=40))
    )[0]
    assert record.quality.degradation > 0.1
    assert (record.trials[0].share, record.equivalents) == (1, pytest.approx(counted))


# Metrics whose batches do not repeat


def noisy(model: nn.Module, batch: torch.Tensor) -> float:
    return float(cross_entropy(model, batch)) * (1 + 0.001 * noisy.draw.gauss(0, 1))


def drawing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, batch) + 0.001 * torch.rand(())


@pytest.mark.parametrize("loss_fn", [noisy, drawing])
@pytest.mark.usefixtures("coarse_grids")
def test_a_noisy_loss_or_one_that_draws_random_numbers_is_evaluated_as_a_whole(tmp_path, loss_fn):
    noisy.draw = random.Random(0)
    (first, counted), (second, counted_again) = run(tmp_path, loss_fn, 2, quality=dq.Quality(max_degradation=0.02))
    assert first.equivalents == pytest.approx(counted)
    assert counted == 1 + 3 / 20 + (5 if loss_fn is noisy else 2) + len(first.trials)
    assert all(trial.share == 1 for trial in (*first.trials, *second.trials))
    assert any("the metric is noisy" in note for note in first.notes) == (loss_fn is noisy)
    assert second.equivalents == counted_again == (2 if loss_fn is noisy else 1) + len(second.trials)


def test_an_accuracy_on_batches_is_evaluated_as_often_as_any_metric_that_moves_in_steps(tmp_path):
    def accuracy(model: nn.Module, batch: torch.Tensor) -> float:
        return float((model(batch).argmax(1) == batch).float().mean())

    model, optimizer = training_of()
    evaluate = dq.LossOn(BATCHES, accuracy)
    with dq.Checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, higher_is_better=True, quality=dq.Quality(max_degradation=0.05)
    ) as ckpt:
        train(model, optimizer, 10)
        records = [ckpt.save(step).result() for step in (1, 2) if train(model, optimizer) is None]
    of_original = [record.equivalents - sum(trial.share for trial in record.trials) for record in records]
    assert of_original[0] == pytest.approx(5)
    assert 1 <= of_original[1] < 1.5  # also destroyed weights, on a few batches, if a candidate was no worse
    assert all(record.quality.degradation <= 0.05 for record in records)
    assert all(
        record.quality.original == pytest.approx(round(record.quality.original * 320) / 320) for record in records
    )


@pytest.mark.parametrize("count", [1, 3])
def test_with_few_batches_all_are_always_evaluated(tmp_path, count):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=dq.LossOn(BATCHES[:count], cross_entropy)) as ckpt:
        train(model, optimizer)
        record = ckpt.save(1).result()
    assert {trial.share for trial in record.trials} == {1.0}
    assert record.equivalents == 2 + len(record.trials)


# Faults


def test_a_loss_that_is_not_finite_on_one_batch_makes_the_checkpoint_lossless(tmp_path):
    def broken(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, batch) / (0.0 if batch is BATCHES[7] and broken.on else 1.0)

    broken.on = False
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=dq.LossOn(BATCHES, broken)) as ckpt:
        train(model, optimizer)
        assert ckpt.save(1).result().search == "scale"
        broken.on = True
        record = ckpt.save(2).result()
        assert record.search == "lossless"
        assert any("not finite" in note for note in record.notes)
        broken.on = False
        assert ckpt.save(3).result().search == "scale"


def test_a_candidate_on_which_one_batch_fails_is_not_good_enough(tmp_path):
    def demanding(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(model[1].weight.unique()) < 60:
            raise ZeroDivisionError("too coarse")
        return cross_entropy(model, batch)

    record, _ = run(tmp_path, demanding, 1, quality=dq.Quality(max_degradation=0.5))[0]
    failed = [trial for trial in record.trials if trial.error]
    assert failed
    assert all(trial.error == "ZeroDivisionError: too coarse" and math.isnan(trial.degradation) for trial in failed)
    assert record.configuration not in [trial.configuration for trial in failed]


def test_a_loss_function_that_has_never_worked_is_an_error(tmp_path):
    def fail(_model: nn.Module, _batch: torch.Tensor) -> float:
        raise ZeroDivisionError("no tokens")

    model, optimizer = training_of()
    evaluate = dq.LossOn(BATCHES, fail)
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt, pytest.raises(dq.EvaluateError):
        ckpt.save(1)


def test_evaluations_on_batches_leave_no_trace_in_the_training(tmp_path):
    def trained(save: bool) -> list[bytes]:
        model, optimizer = training_of()
        with dq.Checkpointer(tmp_path / str(save), model, optimizer, evaluate=dq.LossOn(BATCHES, drawing)) as ckpt:
            for step in range(3):
                train(model, optimizer)
                if save:
                    ckpt.save(step)
        return bits([model.state_dict(), torch.get_rng_state()])

    assert trained(True) == trained(False)


# The protocol


class Own:
    """A user's metric on batches."""

    def __call__(self, model: nn.Module) -> float:
        return sum(self.losses(model, range(len(self)))) / len(self)

    def __len__(self) -> int:
        return len(BATCHES)

    def losses(self, model: nn.Module, batches) -> list[float]:
        with torch.no_grad():
            return [float(cross_entropy(model.eval(), BATCHES[index])) for index in batches]


def test_a_users_own_metric_can_be_evaluated_on_batches(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=Own(), quality=dq.Quality(max_degradation=0.003)) as ckpt:
        train(model, optimizer, 5)
        original = Own()(model)
        record = ckpt.save(1).result()
    assert record.quality.original == pytest.approx(original)
    assert min(trial.share for trial in record.trials) < 1


def test_losses_that_are_tensors_are_taken_as_numbers(tmp_path):
    class InTensor(Own):
        def losses(self, model: nn.Module, batches) -> torch.Tensor:
            return torch.tensor(super().losses(model, batches), dtype=torch.float64)

    def saved(evaluate: Own) -> dq.Record:
        model, optimizer = training_of()
        with dq.Checkpointer(tmp_path / type(evaluate).__name__, model, optimizer, evaluate=evaluate) as ckpt:
            return ckpt.save(1).result()

    assert saved(InTensor()).quality == saved(Own()).quality


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([0.5] * len(BATCHES), f"returned {len(BATCHES)} numbers for "),  # however many it is asked for
        ([0.5] * 2, f"returned 2 numbers for {len(BATCHES)} batches"),
        (0.5, "returned 0.5; it must return one number for each batch"),
        ([None] * len(BATCHES), "it must return one number for each batch"),
    ],
)
def test_losses_that_are_not_one_number_for_each_batch_are_an_error(tmp_path, returned, says):
    class Wrong(Own):
        def losses(self, *_: object) -> object:
            return returned

    model, optimizer = training_of()
    with (
        dq.Checkpointer(tmp_path, model, optimizer, evaluate=Wrong()) as ckpt,
        pytest.raises(dq.EvaluateError, match=says),
    ):
        ckpt.save(1)


def test_a_metric_that_keeps_its_past_losses_in_a_list_is_evaluated_as_a_whole():
    class Remembering:
        losses = (0.5, 0.25)

        def __call__(self, _: nn.Module) -> float:
            return 0.5

        def __len__(self) -> int:
            return len(self.losses)

    assert on_batches(Remembering()) is None


def test_a_metric_of_several_models_is_evaluated_on_batches_too(tmp_path):
    evaluate = dq.LossOn(BATCHES, lambda models, batch: cross_entropy(models["a"], batch))
    assert on_batches(of_several(evaluate)) is not None
    assert on_batches(of_several(len)) is None
    model, optimizer = training_of()
    with dq.Checkpointer(
        tmp_path, {"a": model}, optimizer, evaluate=evaluate, quality=dq.Quality(max_degradation=0.003)
    ) as ckpt:
        train(model, optimizer, 5)
        record = ckpt.save(1).result()
    assert min(trial.share for trial in record.trials) < 1


def test_a_subclass_that_changes_what_a_call_returns_is_evaluated_as_a_whole(tmp_path):
    class Squared(dq.LossOn):
        def __call__(self, model: nn.Module) -> float:
            return super().__call__(model) ** 2

    assert on_batches(dq.LossOn(BATCHES, cross_entropy)) is not None
    assert on_batches(Squared(BATCHES, cross_entropy)) is None
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=Squared(BATCHES, cross_entropy)) as ckpt:
        train(model, optimizer, 5)
        squared = Squared(BATCHES, cross_entropy)(model)
        assert ckpt.save(1).result().quality.original == squared


def test_batches_of_a_loss_are_those_asked_for():
    model = training_of()[0].eval()
    evaluate = dq.LossOn(BATCHES, cross_entropy)
    expected = [cross_entropy(model, BATCHES[index]).item() for index in (3, 0, 3)]
    assert evaluate.losses(model, [3, 0, 3]) == expected
    assert len(evaluate) == 20
