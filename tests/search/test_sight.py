"""A metric that does not see the weights it is given, or prefers destroyed ones, does not decide on a checkpoint."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ordinary_trainings import INPUTS, OPTIMIZERS, TARGETS, TRAININGS, accuracy_on, loss_on, mlp, steps
from torch import nn
from torch.nn import functional as F

import dynaquant as dq
from dynaquant.search.scores import MeasuredQuality
from dynaquant.search.sight import has_worsened, is_suspicious, sight_of

loss, accuracy = loss_on(INPUTS, TARGETS), accuracy_on(INPUTS, TARGETS)


def trained(count: int = 60) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, count)
    return model, optimizer


def loss_of_both(other: nn.Module, _: nn.Module) -> float:
    return loss(other)


def of_a_copy(model: nn.Module) -> Callable[[nn.Module], float]:
    other = copy.deepcopy(model)
    return lambda _: loss(other)


def traced(model: nn.Module) -> Callable[[nn.Module], float]:
    other = torch.jit.trace(model, INPUTS)
    return lambda _: loss(other)


def average(model: nn.Module) -> Callable[[nn.Module], float]:
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return lambda _: loss(ema)


def partly_applied(model: nn.Module) -> Callable[[nn.Module], float]:
    return partial(loss_of_both, copy.deepcopy(model))


def captured(model: nn.Module) -> Callable[[nn.Module], float]:
    """As a CUDA graph: it reads the memory that the weights had when it was captured."""
    memory = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def replay(_: nn.Module) -> float:
        return F.cross_entropy(torch.func.functional_call(mlp(), memory, INPUTS), TARGETS).item()

    return replay


BLIND = [of_a_copy, average, partly_applied, captured, lambda _: lambda _: 0.0, lambda _: lambda _: 1.0]
NAMES = ["copy", "average", "partial", "captured", "zero", "one"]


def check_survives(folder, model: nn.Module, step: int) -> None:
    """Assert that the weights were stored as without a metric: the real loss is hardly worse."""
    other = mlp()
    other.load_state_dict(dq.load(folder, step)["model"])
    assert loss(other) <= 1.25 * loss(model)


def messages(caplog, said: str) -> list[str]:
    return [message for message in caplog.messages if said in message]


@pytest.mark.parametrize("batched", [False, True], ids=["function", "batches"])
@pytest.mark.parametrize("blind", BLIND, ids=NAMES)
def test_a_metric_that_scores_another_model_is_said_at_the_first_save_and_does_not_decide(
    tmp_path, caplog, blind, batched
):
    model, optimizer = trained()
    evaluate = blind(model)
    if batched:
        evaluate = dq.LossOn(range(5), lambda scored, _, blind=evaluate: blind(scored))
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        first = ckpt.save(1).result()
        check_survives(tmp_path, model, 1)
        assert (first.judged_by, first.search) == ("fisher distortion", "scale")
        assert first.quality.restored == first.quality.original  # as the metric says, for what ranks checkpoints by it
        assert first.degradation is None
        assert first.equivalents > 2
        assert first.notes == messages(caplog, "evaluate does not tell weights apart") == caplog.messages
        assert "Let it score the model that it is given" in first.notes[0]
        steps(model, optimizer, 5)
        second = ckpt.save(2).result()
        check_survives(tmp_path, model, 2)
    assert second.judged_by == "fisher distortion"
    assert len(second.notes) == len(caplog.messages) == 1  # logged once, noted in each record


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_model_is_seen_as_another_model(tmp_path, caplog):
    model, optimizer = trained()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=traced(model)) as ckpt:
        assert ckpt.save(1).result().judged_by == "fisher distortion"
    assert len(messages(caplog, "does not tell weights apart")) == 1
    check_survives(tmp_path, model, 1)


@pytest.mark.parametrize("method", ["grid", "published"])
def test_a_blind_metric_finds_what_no_metric_finds(tmp_path, method):
    model, optimizer = trained()
    found = []
    for name, evaluate in (("blind", lambda _: 1.0), ("none", None)):
        with dq.Checkpointer(
            tmp_path / name,
            model,
            optimizer,
            evaluate=evaluate,
            quality=dq.Quality(method=method, max_degradation=0.01),
        ) as ckpt:
            found.append(ckpt.save(1).result().configuration)
    if method == "grid":
        assert found[0] == found[1]
    else:  # sensitivities are not known to the estimate here
        assert None not in found


def test_a_metric_that_is_constant_for_a_while_decides_as_soon_as_it_tells_something(tmp_path, caplog):
    """A reward that is 0 at the start."""
    model, optimizer = trained()
    constant = [True]
    options = {"evaluate": lambda scored: 0.0 if constant[0] else accuracy(scored), "higher_is_better": True}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        judges = []
        for step in range(1, 7):
            constant[0] = step in (1, 2, 5)
            judges.append(ckpt.save(step).result().judged_by)
            check_survives(tmp_path, model, step) if constant[0] else None
            steps(model, optimizer, 3)
    told = ["evaluate" if judge == "evaluate" else "estimate" for judge in judges]
    assert told == ["estimate", "estimate", "evaluate", "evaluate", "estimate", "evaluate"]
    assert len(messages(caplog, "does not tell weights apart")) == 2


def test_an_accuracy_that_is_the_same_for_good_candidates_still_decides(tmp_path, caplog):
    """On few data, coarse candidates answer as the weights in training do."""
    model, optimizer = trained(300)
    calls = []
    best, second = model(INPUTS).topk(2).values.unbind(1)
    clear = (best - second).argsort(descending=True)[:20]  # the clearest cases

    def on_few(scored: nn.Module) -> float:
        calls.append(scored)
        with torch.no_grad():
            return (scored(INPUTS[clear]).argmax(1) == TARGETS[clear]).float().mean().item()

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=on_few, higher_is_better=True) as ckpt:
        record = ckpt.save(1).result()
    assert {trial.degradation for trial in record.trials} == {0.0}
    assert record.judged_by == "evaluate"
    (note,) = record.notes
    assert note.startswith("the metric is the same for all weights tried")
    assert caplog.messages == [note]
    assert record.equivalents == len(calls) == 5 + len(record.trials) + 1  # one for destroyed weights


@pytest.mark.parametrize(
    ("metric", "higher_is_better", "advice"),
    [
        (accuracy, False, "If a higher number is better, give higher_is_better=True"),
        (loss, True, "If a lower number is better, leave out higher_is_better"),
    ],
)
@pytest.mark.parametrize("method", ["grid", "published"])
def test_a_metric_given_the_wrong_way_round_is_said_and_does_not_destroy_weights(
    tmp_path, caplog, metric, higher_is_better, advice, method
):
    model, optimizer = trained()
    options = {"evaluate": metric, "higher_is_better": higher_is_better, "quality": dq.Quality(method=method)}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step in (1, 2, 3):
            record = ckpt.save(step).result()
            assert "distortion" in record.judged_by
            assert len(messages(record_notes(record), advice)) == 1
            check_survives(tmp_path, model, step)
            steps(model, optimizer, 3)
    assert len(messages(caplog, advice)) == 1


def test_a_forgotten_higher_is_better_is_found_once_the_training_has_raised_the_metric(tmp_path, caplog):
    """Also if every candidate happens to score a little higher than the weights in training, which looks worse."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    in_training = dict(model.named_parameters())

    def raised(scored: nn.Module) -> float:
        moved = any(not parameter.equal(in_training[name]) for name, parameter in scored.named_parameters())
        return accuracy(scored) + (1e-3 if moved and scored[0].weight.any() else 0.0)

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=raised, quality=dq.Quality(max_degradation=0.05)) as ckpt:
        assert ckpt.save(1).result().judged_by == "evaluate"
        for step in (2, 3, 4):
            steps(model, optimizer, 60)
            record = ckpt.save(step).result()
            assert "distortion" in record.judged_by
            assert len(messages(record_notes(record), "give higher_is_better=True")) == 1
    assert len(messages(caplog, "give higher_is_better=True")) == 1


def test_a_loss_that_rises_as_a_training_overfits_costs_one_evaluation_once(tmp_path, caplog):
    model, optimizer = trained()
    calls, factor = [], [1.0]

    def overfitting(scored: nn.Module) -> float:
        calls.append(scored)
        return factor[0] * loss(scored)

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=overfitting) as ckpt:
        spent = []
        for step, factor[0] in enumerate((1.0, 1.5, 1.5)):
            before = len(calls)
            record = ckpt.save(step).result()
            spent.append(len(calls) - before - record.evaluations)
    assert spent[1] == spent[2] + 1
    assert caplog.messages == []


class record_notes:  # noqa: N801
    """Gives the notes of a record as caplog gives messages."""

    def __init__(self, record: dq.Record) -> None:
        self.messages = record.notes


def test_several_models_and_a_file_are_covered_too(tmp_path, caplog):
    model, optimizer = trained()
    with dq.Checkpointer(tmp_path / "run", {"net": model}, optimizer, evaluate=lambda _: 2.5) as ckpt:
        assert ckpt.save(1).result().judged_by == "fisher distortion"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    record = dq.save(state, tmp_path / "state.dqc", metric=lambda _: loss(model))
    assert record.judged_by == "fisher distortion"
    assert len(messages(caplog, "does not tell weights apart")) == 2


# Ordinary trainings


@pytest.mark.parametrize("metric_on", [loss_on, accuracy_on])
@OPTIMIZERS
@TRAININGS
def test_ordinary_trainings_are_not_suspected_early_or_late(tmp_path, caplog, training_of, optimizer_of, metric_on):
    torch.manual_seed(0)
    model, inputs, targets = training_of()
    optimizer = optimizer_of(model.parameters())
    options = {
        "evaluate": metric_on(inputs, targets),
        "higher_is_better": metric_on is accuracy_on,
        "keep": dq.Keep(last=1),
    }
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        for step, more in enumerate((0, 1, 4, 15, 60)):
            steps(model, optimizer, more, inputs, targets)
            ckpt.save(step).result()
    assert messages(caplog, "all weights are zero") == messages(caplog, "whose weights are all zero") == []


# The rules


def test_scores_are_suspicious_only_if_no_candidate_was_worse():
    assert not is_suspicious([], 0.01, before="blind")
    assert not is_suspicious([0.0, 0.0, 1e-9], 0.01, before="blind")
    assert not is_suspicious([math.nan, -0.5], 0.01, before="blind")
    assert not is_suspicious([-0.002], 0.01, before="sees")
    assert is_suspicious([-0.002], 0.01, before="blind")
    assert is_suspicious([0.002], 0.01, before="upside down")
    assert all(is_suspicious(each, 0.01, before="sees") for each in ([0.0], [-0.02], [-1e-6, -1e-5], [None, 0.0]))


def test_a_metric_has_worsened_by_more_than_a_fifth():
    assert has_worsened(2.0, 2.5, higher_is_better=False)
    assert not has_worsened(2.0, 2.3, higher_is_better=False)
    assert not has_worsened(2.0, 2.5, higher_is_better=True)
    assert has_worsened(-10.0, -13.0, higher_is_better=True)


def test_one_replica_whose_metric_sees_is_enough():
    same, worse, failed = (
        MeasuredQuality(1.0, 1.0, 0.0),
        MeasuredQuality(1.0, 1.1, 0.1),
        MeasuredQuality(1.0, math.inf, math.nan),
    )
    assert sight_of([same, same]) == "blind"
    assert sight_of([same, worse]) == sight_of([same, failed]) == sight_of([same, None]) == "sees"
    assert sight_of([MeasuredQuality(0.9, 0.1, -0.89), MeasuredQuality(0.9, 0.5, -0.44)]) == "upside down"
    assert sight_of([MeasuredQuality(2.5, 2.08, -0.17)]) == sight_of([MeasuredQuality(0.07, 0.1, -0.43)]) == "sees"
    assert sight_of([MeasuredQuality(0.0, 0.1, -math.inf)]) == "blind"
