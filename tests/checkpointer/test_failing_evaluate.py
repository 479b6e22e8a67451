"""If ``evaluate`` raises or returns no finite number, the checkpoint is saved, and its record says so."""

from dataclasses import replace

import pytest
import torch
from small_runs import EVERY_WAY, FIXED, training_of, weights_of
from torch import nn
from training import bits, named_state, train

import dynaquant as dq
from dynaquant.saving.record import record_of
from dynaquant.search.scores import MeasuredQuality
from dynaquant.store.run import Run
from dynaquant.training.collect import collect


class Failing:
    """A metric that can be made to fail, after it has drawn random numbers and changed modes."""

    def __init__(self) -> None:
        self.fails = True

    def __call__(self, model: nn.Module) -> float:
        model.eval()
        torch.rand(3)
        if self.fails:
            raise ArithmeticError("no score")
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]  # every way quantizes them
        total = sum(float(matrix.double().sum()) for matrix in matrices)
        # All zero is worse. The same number for all others would be a metric in coarse steps.
        return 1.0 + 1e-5 * total if any(matrix.any() for matrix in matrices) else 2.0


@EVERY_WAY
def test_if_evaluate_fails_the_checkpoint_is_saved_and_training_does_not_change(tmp_path, way):
    model, optimizer = training_of()
    evaluate, configuration = Failing(), way.get("quality", dq.Quality()).configuration
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, **way) as ckpt:
        evaluate.fails = False
        ckpt.save(0).result()
        evaluate.fails = True
        train(model, optimizer)
        before = bits(collect({"model": model, "optimizer": optimizer}))
        record = ckpt.save(1).result()
        assert bits(collect({"model": model, "optimizer": optimizer})) == before
        assert all(module.training for module in model.modules())
        assert (record.configuration, record.quality) == (configuration, None)
        assert record.search == ("lossless" if configuration is None else "fixed")
        assert len(record.notes) == 1
        assert record.notes[0].startswith("evaluate failed (ArithmeticError: no score): ")
        exact = bits(dict(dq.load(tmp_path, 1)["model"])) == bits(weights_of(model))
        assert exact == (configuration is None)
        if way:
            assert bits(dq.load(tmp_path, 1)["optimizer"]) == bits(named_state(optimizer, model=model))
        evaluate.fails = False
        train(model, optimizer)
        after = ckpt.save(2).result()
        assert (after.quality.degradation, after.notes) == (pytest.approx(0, abs=1e-3), [])
        assert after.search == ("fixed" if configuration else "neighbourhood" if way else "scale")
        assert configuration in (None, after.configuration)
    assert record == as_kept(tmp_path, record)


def as_kept(folder, returned: dq.Record) -> dq.Record:
    """Return the run's record of the same save, with the seconds that only the returned record has."""
    kept = record_of(Run(folder).file(returned.step))
    return replace(kept, seconds=returned.seconds)


def test_weights_stored_exactly_once_are_quantized_at_the_next_save(tmp_path):
    model, optimizer = training_of()
    evaluate = Failing()
    evaluate.fails = False
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        sizes, states = [], []
        for step, evaluate.fails in enumerate((False, True, False)):
            record = ckpt.save(step).result()
            sizes.append(record.roles["weight"].stored)
            assert (record.configuration is None) == evaluate.fails
            train(model, optimizer)
            states.append(bits(dq.load(tmp_path, step)))
    assert sizes[1] > 3 * max(sizes[0], sizes[2])
    for step, state in enumerate(states):
        with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt:
            assert ckpt.restore(step) == step
            assert bits(dq.load(tmp_path, step)) == state


def only_restored(model: nn.Module, original: float, restored: float):
    """A metric with one score for the weights in training, and another for all others."""
    weights = bits(weights_of(model))
    return lambda scored: original if bits(weights_of(scored)) == weights else restored


@EVERY_WAY
@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_weights_in_training_with_a_metric_that_is_not_finite_are_saved(tmp_path, score, way):
    model, optimizer = training_of()
    configuration = way.get("quality", dq.Quality()).configuration
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=lambda _: score, **way) as ckpt:
        record = ckpt.save(1).result()
        assert "the metric of the weights in training is not finite" in record.notes[-1]
        assert (record.configuration, record.quality, record.trials) == (configuration, None, [])
        assert record == as_kept(tmp_path, record)
    exact = bits(dict(dq.load(tmp_path)["model"])) == bits(weights_of(model))
    assert exact == (configuration is None)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
@pytest.mark.parametrize("original", [1.0, 0.0])
@FIXED
def test_a_metric_of_the_restored_weights_that_is_not_finite_is_in_the_record(tmp_path, original, score, configuration):
    model, optimizer = training_of()
    options = {"evaluate": only_restored(model, original, score), "quality": dq.Quality(configuration=configuration)}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        record = ckpt.save(1).result()
        assert repr(record.quality) == repr(MeasuredQuality(original, score, score))  # as text, because NaN != NaN
        assert record.notes[-1] == "the metric is not finite: the degradation of this checkpoint is unknown"
        assert repr(ckpt.records()[0].quality) == repr(record.quality)
        assert bits(ckpt.records()[0].trials[0].degradation) == bits(score)


@pytest.mark.parametrize("scores", [(1.0, float("nan")), (1.0, float("inf")), (0.0, 1e-9), (1.0, 1.0101)], ids=str)
@pytest.mark.parametrize("method", ["grid", "published"])
def test_weights_are_stored_exactly_when_no_candidate_is_good_enough(tmp_path, scores, method):
    model, optimizer = training_of()
    with dq.Checkpointer(
        tmp_path, model, optimizer, evaluate=only_restored(model, *scores), quality=dq.Quality(method=method)
    ) as ckpt:
        record = ckpt.save(1).result()
        assert (record.search, record.configuration, record.quality) == ("lossless", None, None)
        assert record.trials
        assert not any(trial.degradation <= 0.01 for trial in record.trials)
        assert bits(dict(dq.load(tmp_path)["model"])) == bits(weights_of(model))


@FIXED
def test_a_loss_of_zero_does_not_prevent_a_save(tmp_path, configuration):
    model, optimizer = training_of()
    options = {"evaluate": only_restored(model, 0.0, 0.5), "quality": dq.Quality(configuration=configuration)}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        assert ckpt.save(1).result().quality.degradation == float("inf")
        assert ckpt.records()[0].quality.degradation == float("inf")


def test_a_number_that_is_text_is_no_number(tmp_path):
    model, optimizer = training_of()
    said = r"evaluate returned '0\.123'; it must return one number, not text"
    with (
        dq.Checkpointer(tmp_path, model, optimizer, evaluate=lambda _: "0.123") as ckpt,
        pytest.raises(dq.EvaluateError, match=said),
    ):
        ckpt.save(1)
    batched = dq.LossOn([1.0, 2.0], lambda _, batch: f"{batch:.3f}")
    with (
        dq.Checkpointer(tmp_path, model, optimizer, evaluate=batched) as ckpt,
        pytest.raises(dq.EvaluateError, match=r"loss_fn of LossOn returned '1\.000'; it must return one number"),
    ):
        ckpt.save(1)


@pytest.mark.parametrize("batches", [1, 8])
def test_a_loss_fn_of_other_arguments_gets_advice_of_its_own(tmp_path, batches):
    model, optimizer = training_of()
    wrong = dq.LossOn([(1.0, 2.0)] * batches, lambda model, inputs, targets: 0.0)  # noqa: ARG005
    with (
        dq.Checkpointer(tmp_path, model, optimizer, evaluate=wrong) as ckpt,
        pytest.raises(
            dq.EvaluateError, match=r"loss_fn of LossOn must take the model and a batch and return one number"
        ),
    ):
        ckpt.save(1)
