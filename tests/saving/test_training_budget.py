"""The budget of a training: what restores have cost, and what the next checkpoint may lose."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dynaquant as dq
from dynaquant.saving.training_budget import TrainingBudget, TrainingPosition, learning_rate, scaled_by_rate

LEAST_SHARE = 0.05
SHARE_OF_ONE = 0.25

BUDGET = TrainingBudget(total=0.005, largest=0.01, scaled=True)
UNSCALED = TrainingBudget(total=0.005, largest=0.01)
STEPS, EVERY = 400, 40


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


def at(budget, step, rate):
    """The account at a save."""
    return budget.at(TrainingPosition(step, rate, scaled=budget.scaled))


def trained(rate_at, restored_at=(), budget=BUDGET):
    """The account at the end, and what was allowed at each checkpoint. Restores lose all that was allowed."""
    allowed = {}
    for step in range(EVERY, STEPS + 1, EVERY):
        budget = at(budget, step, rate_at(step))
        allowed[step] = budget.allowed
        if step in restored_at:
            budget = budget.restored(budget.allowed)
    return budget, allowed


@pytest.mark.parametrize(
    ("rate_at", "budget", "assumed"),
    [
        (lambda _: 0.1, BUDGET, "restores add up, because the learning rate does not change"),
        (lambda _: 0.0, BUDGET, "restores add up, because the learning rate does not change"),
        (
            cosine,
            UNSCALED,
            "restores add up, because the learning rate does not say how fast the optimizer heals errors",
        ),
    ],
    ids=["constant", "unknown", "unscaled"],
)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_where_nothing_says_that_errors_heal_restores_add_up(rate_at, budget, assumed, every):
    restored_at = range(0, STEPS, every * EVERY)
    found, allowed = trained(rate_at, restored_at, budget)
    assert found.assumed == assumed
    assert found.spent == found.felt == pytest.approx(sum(allowed[step] for step in restored_at if step))
    assert max(allowed.values()) == SHARE_OF_ONE * budget.total
    assert found.spent <= budget.total + len(restored_at) * LEAST_SHARE * budget.largest


def test_errors_heal_where_a_schedule_changes_the_rate_of_an_optimizer_that_it_scales():
    budget, _ = trained(cosine, [40])
    assert budget.assumed == "errors heal as fast as the learning rate tells"
    assert budget.felt < 0.1 * BUDGET.largest


@pytest.mark.parametrize("scheduled", [(0,), (1,), (0, 1), ()])
def test_if_only_some_optimizers_have_a_schedule_restores_add_up(scheduled):
    weights = [nn.Parameter(torch.zeros(size)) for size in (10, 1000)]
    optimizers = [torch.optim.AdamW([weights[0]], lr=0.001), torch.optim.SGD([weights[1]], lr=0.1)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[i], STEPS) for i in scheduled]
    budget = TrainingBudget(0.005, 0.01)
    for step in range(1, STEPS // 2):
        for each in (*optimizers, *schedules):
            each.step()
        if step % EVERY == 0:
            budget = budget.at(TrainingPosition.of(step, optimizers))
    assert budget.heals == (len(scheduled) == 2)
    assert budget.allowed > 0.001 if budget.heals else budget.allowed == SHARE_OF_ONE * budget.total
    if len(scheduled) == 1:
        assert budget.assumed == "restores add up, because only some parameters have a schedule for the learning rate"


@pytest.mark.parametrize("every", [1, 2, 4])
def test_however_often_a_training_is_restored_while_its_rate_rises_what_is_left_is_at_most_one_degradation(every):
    budget, allowed = trained(lambda step: step, range(0, STEPS, every * EVERY))
    assert budget.spent == 0
    assert LEAST_SHARE * BUDGET.largest <= min(allowed.values()) < 0.8 * BUDGET.largest
    assert budget.felt <= BUDGET.largest


def test_the_budget_is_divided_by_the_number_of_restores_that_the_user_expects():
    restored_at = range(0, STEPS, EVERY)
    for expected in (1, 3, 9):
        found, allowed = trained(lambda _: 0.1, restored_at, TrainingBudget(0.005, 0.01, expected, scaled=True))
        assert allowed[EVERY] == pytest.approx(0.005 / expected)
        assert found.count == len(restored_at) - 1
        assert sum(list(allowed.values())[:expected]) == pytest.approx(0.005)
    often = TrainingBudget(0.005, 0.01, 10_000)
    assert at(often, 40, 0.1).allowed == LEAST_SHARE * 0.01
    again = often.continued(json.loads(json.dumps(found.to_json())), found.step, 0.1)
    assert (again.count, again.expected) == (found.count, 10_000)


def test_the_learning_rate_scales_the_updates_of_known_optimizers_only():
    parameter = nn.Parameter(torch.zeros(3))
    optimizers = {name: getattr(torch.optim, name)([parameter], lr=0.1) for name in ("AdamW", "SGD", "NAdam")}
    assert all(scaled_by_rate([optimizer]) for optimizer in optimizers.values())
    assert scaled_by_rate(list(optimizers.values()))

    class Own(torch.optim.SGD):
        pass

    others = [torch.optim.Adagrad([parameter]), torch.optim.Rprop([parameter]), Own([parameter], lr=0.1)]
    assert not any(scaled_by_rate([*optimizers.values(), other]) for other in others)
    assert not scaled_by_rate([])


def test_less_is_allowed_as_the_learning_rate_falls_and_never_less_than_the_least_share():
    _, allowed = trained(cosine)
    values = list(allowed.values())
    assert values[0] == SHARE_OF_ONE * BUDGET.total  # a single learning rate is no schedule yet
    assert values[1:] == sorted(values[1:], reverse=True)
    assert values[1] > 0.5 * BUDGET.largest
    assert values[-1] == pytest.approx(BUDGET.total / 4)
    _, allowed = trained(cosine, range(0, STEPS, EVERY), TrainingBudget(1e-5, 0.01, scaled=True))
    assert min(allowed.values()) == LEAST_SHARE * 0.01


def test_a_warm_up_does_not_count_as_the_end_of_a_schedule():
    _, allowed = trained(lambda step: step)
    assert set(list(allowed.values())[1:]) == {BUDGET.largest}


def test_late_restores_leave_less_for_the_next_and_early_ones_heal():
    _, none = trained(cosine)
    late, after_late = trained(cosine, [280])
    early, after_early = trained(cosine, [40])
    assert after_late[320] < 0.95 * none[320]
    assert after_early[320] > 0.98 * none[320]
    assert late.spent > 10 * early.spent


@given(st.lists(st.integers(1, 9), unique=True), st.floats(1e-4, 0.05))
def test_restores_from_a_cosine_schedule_never_use_more_than_the_budget(numbers, total):
    budget, _ = trained(cosine, [EVERY * n for n in numbers], TrainingBudget(total, 2 * total, scaled=True))
    assert budget.spent <= total


def test_without_optimizers_or_with_strange_learning_rates_the_account_goes_on():
    assert learning_rate([]) == 0.0
    assert at(at(BUDGET, 10, 0.1), 20, math.nan).rate == 0.1
    assert BUDGET.restored(math.nan) == BUDGET.restored(-0.1) == replace(BUDGET, count=1)


def test_the_learning_rate_is_the_mean_over_parameters():
    small, large = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(30))
    optimizer = torch.optim.Adam([{"params": [small], "lr": 0.1}, {"params": [large], "lr": torch.tensor(0.3)}])
    assert learning_rate([optimizer]) == pytest.approx(0.25)


def test_the_account_continues_from_a_record():
    budget, _ = trained(cosine, [200, 360])
    again = BUDGET.continued(json.loads(json.dumps(budget.to_json())), budget.step, 0.3)
    assert again == budget


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"learned": -1.0, "rate": 0.1, "highest": 0.1, "step": 3, "restores": []},
        {"learned": 1.0, "rate": True, "highest": 0.1, "step": 3, "restores": []},
        {"learned": 10**400, "rate": 0.1, "highest": 0.1, "restores": []},
        {"learned": 1.0, "rate": 0.1, "highest": 0.1, "step": 3, "restores": [[0.1]]},
        {"learned": 1.0, "rate": 0.1, "highest": 0.1, "step": 3, "restores": 7},
    ],
)
def test_without_a_valid_account_it_begins_anew_as_if_the_learning_rate_had_always_been_the_same(data):
    budget = BUDGET.continued(data, 200, 0.1)
    assert (budget.learned, budget.rate, budget.highest, budget.step) == (20, 0.1, 0.1, 200)
    restored = at(budget.restored(0.01), 240, 0.02)
    assert restored.spent == pytest.approx(0.8 * 0.01 * (20 / 22.4) ** 4)


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def saved(folder, until, **options):
    """Continue a training until a step, and return the records of all its checkpoints."""
    model, optimizer, scheduler = training()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    y = x[:, :4].argmax(1)

    def loss(model):
        return nn.functional.cross_entropy(model(x), y)

    settings = {"every": 20, "evaluate": lambda model: float(loss(model)), **options}
    with dq.Checkpointer(folder, model, optimizer, extras={"scheduler": scheduler}, **settings) as ckpt:
        start = ckpt.restore() or 0
        for step in range(start + 1, until + 1):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if ckpt.due(step):
                ckpt.save(step)
        return ckpt.records()


def test_checkpoints_become_stricter_and_the_account_survives_restores(tmp_path):
    for until in (40, 60, 90):
        records = saved(tmp_path, until)
    limits = [record.limit for record in records]
    assert limits[0] > 0.005
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < 0.002
    assert all(record.quality.degradation <= record.limit for record in records)
    assert records[0].budget_spent == records[1].budget_spent == 0
    assert 0 < records[-1].budget_spent < 0.005
    assert records[0].restores_felt == records[1].restores_felt == 0
    assert 0 < records[3].budget_spent < records[3].restores_felt <= 0.01


def test_with_max_degradation_alone_every_checkpoint_may_use_it(tmp_path):
    records = saved(tmp_path, 100, quality=dq.Quality(max_degradation=0.02))
    assert {record.limit for record in records} == {0.02}
    assert {record.budget_spent for record in records} == {record.restores_felt for record in records} == {None}


def test_a_budget_of_the_training_goes_with_max_degradation(tmp_path):
    records = saved(tmp_path, 100, quality=dq.Quality(max_degradation=0.02, training_budget=0.002))
    assert records[0].limit <= 0.02
    assert records[-1].limit == pytest.approx(LEAST_SHARE * 0.02)


def test_setting_max_degradation_ends_the_budget_of_the_preset_only(tmp_path):
    model, optimizer, _ = training()
    least = 0.03 * LEAST_SHARE
    for budget, expected in ((None, [0.03, 0.03]), (0.002, [least, least])):
        limits = []
        with dq.Checkpointer(
            tmp_path / str(budget), model, optimizer, quality=dq.Quality(training_budget=budget)
        ) as ckpt:
            ckpt.max_degradation = 0.03
            for step, rate in ((10, 0.01), (20, 0.0001)):
                optimizer.param_groups[0]["lr"] = rate
                limits.append(ckpt.save(step).result().limit)
        assert limits == pytest.approx(expected)


class Demanding:
    """A metric that every candidate makes worse by 0.5 % at least, and coarser ones by more. It can be on batches."""

    def __init__(self, model: nn.Module, strictness: float) -> None:
        self.exact, self.strictness = [p.detach().clone() for p in model.parameters()], strictness

    @torch.no_grad()
    def __call__(self, model: nn.Module, batch: float = 0.0) -> float:
        errors = [(p - exact).square().sum() / exact.square().sum() for p, exact in self._pairs(model)]
        worse = sum(errors).item()
        return 1.0 + batch + ((0.005 + self.strictness * worse) * (1 + batch) if worse else 0.0)

    def _pairs(self, model: nn.Module):
        return zip(model.parameters(), self.exact, strict=True)


BATCHES = [0.1 * ((7 * i) % 11 - 5) for i in range(11)]  # their mean is 0


@pytest.mark.parametrize("batched", [False, True], ids=["function", "batches"])
def test_if_nothing_stays_within_the_budget_the_best_of_what_was_tried_is_taken(tmp_path, caplog, batched):
    model, optimizer, _ = training()
    metric = Demanding(model, 0.1)
    evaluate = dq.LossOn(BATCHES, metric) if batched else metric
    options = {"evaluate": evaluate, "quality": dq.Quality(training_budget=1e-6, max_degradation=0.02)}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        ckpt.save(1)
        caplog.clear()
        optimizer.param_groups[0]["lr"] = 1e-6
        record = ckpt.save(2).result()
        restored = copy.deepcopy(model)
        restored.load_state_dict(dq.load(tmp_path, 2)["model"])
    chosen = next(trial for trial in record.trials if trial.configuration == record.configuration)
    assert chosen.configuration.scale == min(trial.configuration.scale for trial in record.trials)
    assert chosen.share == 1
    assert record.limit == 0.02
    assert record.quality.restored == pytest.approx(evaluate(restored), rel=1e-12)  # on all batches
    assert 0.005 <= record.quality.degradation < 0.0051
    assert len({trial.configuration for trial in record.trials}) == len(record.trials)
    if not batched:
        assert record.equivalents == 1 + len(record.trials)
    assert caplog.messages == [note for note in record.notes if "all that the training's budget allows" in note]
    assert len(caplog.messages) == 1


def test_if_the_best_of_what_was_tried_loses_more_than_one_checkpoint_may_weights_are_exact(tmp_path):
    model, optimizer, _ = training()
    options = {"evaluate": Demanding(model, 0.1), "quality": dq.Quality(training_budget=1e-6, max_degradation=0.004)}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        assert ckpt.save(1).result().search == "lossless"
        optimizer.param_groups[0]["lr"] = 1e-6
        assert ckpt.save(2).result().search == "lossless"
