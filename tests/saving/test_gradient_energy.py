"""Without a metric, checkpoints of a training whose gradients have become weak keep what it has learned."""

import pytest
import torch
from torch import nn, optim

import dynaquant as dq
from dynaquant.engine.shards import WHOLE
from dynaquant.saving.gradient_energy import NOTE, GradientEnergy, gradient_energy
from dynaquant.store.run import Run


class Exact:
    """A network that fits forty points exactly, with all of them in every batch: its loss becomes tiny."""

    def __init__(self, make=lambda p: optim.Adam(p, 1e-2)) -> None:
        torch.manual_seed(0)
        self.inputs = torch.linspace(-1, 1, 40)[:, None]
        self.wanted = torch.sin(3 * self.inputs)
        self.model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = make(self.model.parameters())

    def loss(self) -> torch.Tensor:
        return (self.model(self.inputs) - self.wanted).square().mean()

    def train(self, steps: int, rate: float | None = None) -> None:
        for step in range(steps):
            if rate is not None:
                self.optimizer.param_groups[0]["lr"] = rate * (1 - step / steps) + 1e-5

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.loss()
                loss.backward()
                return loss

            self.optimizer.step(closure)


def test_without_a_metric_a_tiny_loss_survives_a_restore(tmp_path, caplog):
    training = Exact()
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        training.train(20)
        early = checkpointer.save(20).result()
        training.train(1500, 1e-2)
        late = checkpointer.save(1520).result()
        before = training.loss().item()
        assert before < 1e-4
        checkpointer.restore()
        assert training.loss().item() < 1.02 * before
    assert NOTE not in early.notes
    assert NOTE in late.notes
    assert late.limit < early.limit / 1000
    assert not [each for each in caplog.records if each.levelname == "WARNING"]  # one note says it


def test_a_restored_training_knows_how_strong_gradients_have_been(tmp_path):
    training = Exact()
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        training.train(5)
        checkpointer.save(5).result()
        training.train(1500, 1e-2)
        checkpointer.save(1505).result()
    strongest = [Run(tmp_path).file(step).header.record["strongest_gradients"] for step in (5, 1505)]
    assert strongest[0] > 0
    assert strongest[1] >= strongest[0]
    again = Exact()
    with dq.Checkpointer(tmp_path, again.model, again.optimizer) as checkpointer:
        checkpointer.restore()
        for state in again.optimizer.state.values():  # as after thousands of steps more
            state["exp_avg_sq"].mul_(1e-4)
            state["exp_avg"].copy_(state["exp_avg_sq"].sqrt())
        again.train(1)
        assert NOTE in checkpointer.save(1506).result().notes


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, 0.1, momentum=0.9), optim.AdamW], ids=["SGD", "AdamW"])
def test_a_training_on_batches_is_stored_as_ever(make, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = make(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for step in range(1, 61):
            inputs = torch.randn(16, 20)
            wanted = inputs[:, :10].argmax(1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), wanted).backward()
            optimizer.step()
            if step % 3 == 0:
                found = checkpointer.save(step).result()
                assert NOTE not in found.notes
                assert found.limit > 1e-3


def matrices_of(training):
    return [p for p in training.model.parameters() if p.ndim > 1]


def energy_of(training, recorded=None):
    parameters = dict(training.model.named_parameters())
    return gradient_energy(parameters, [training.optimizer], recorded or {}, WHOLE)


def test_the_energy_of_adam_is_that_of_its_gradients():
    training = Exact()
    training.train(1)
    square = sum(float(p.grad.double().square().sum()) for p in matrices_of(training))
    found = energy_of(training)
    assert found.average == pytest.approx(square, rel=1e-3)  # after one step, both moments are the gradient
    assert found.now == pytest.approx(19 * square, rel=1e-3)
    assert found.noisy is False


def test_strong_first_gradients_of_a_bias_are_not_the_strongest_of_the_training():
    training = Exact()
    training.train(1)
    before = energy_of(training)
    for parameter, state in training.optimizer.state.items():
        if parameter.ndim < 2:
            state["exp_avg_sq"].mul_(1e6)
    assert energy_of(training) == before


def test_other_optimizers_are_known_by_recorded_gradients():
    training = Exact(lambda p: optim.SGD(p, 0.1))
    training.train(1)
    recorded = {name: float(p.grad.square().mean()) for name, p in training.model.named_parameters()}
    square = sum(float(p.grad.double().square().sum()) for p in matrices_of(training))
    found = energy_of(training, recorded)
    assert found.average == found.now == pytest.approx(square, rel=1e-5)
    assert found.noisy is None
    assert energy_of(training) == GradientEnergy()


@pytest.mark.parametrize(
    ("noise", "options", "expected"),
    [
        (0.0, {}, False),
        (1.0, {}, None),
        (0.0, {"weight_decay": 0.1}, None),  # the momentum is another sum
        (0.0, {"dampening": 0.9}, None),
    ],
)
def test_the_momentum_of_sgd_tells_gradients_without_noise(noise, options, expected):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100, 100))
    optimizer = optim.SGD([weight], 1e-6, momentum=0.9, **options)
    direction = torch.randn(100, 100)
    for _ in range(100):
        weight.grad = noise * torch.randn(100, 100) + (1 - noise) * direction
        optimizer.step()
    found = gradient_energy({"weight": weight}, [optimizer], {"weight": float(weight.grad.square().mean())}, WHOLE)
    assert found.noisy is expected
    if expected is False:
        assert found.now == pytest.approx(19 * found.average, rel=0.2)


def test_the_gradient_tells_noise_if_it_is_there_and_otherwise_the_second_moment():
    training = Exact()
    training.train(100)
    for parameter, state in training.optimizer.state.items():
        state["exp_avg"].copy_(parameter.grad)  # the moving average of equal gradients
        state["exp_avg_sq"].copy_(2 * parameter.grad.square())
    assert energy_of(training).noisy is False
    training.optimizer.zero_grad()
    assert energy_of(training).noisy is True
    for parameter in training.model.parameters():
        parameter.grad = 4 * training.optimizer.state[parameter]["exp_avg"]
    assert energy_of(training).noisy is True


@pytest.mark.parametrize(
    ("average", "now", "strongest", "noisy", "expected"),
    [
        (1.0, 1.0, 1.0, True, 1.0),
        (1.0, 1.0, 0.0, True, 1.0),
        (1.0, 1.0, 1000.0, True, 1.0),  # ten times weaker than in the first steps: a language model
        (1.0, 1.0, 1e5, True, 1.0),  # a deep network without normalization
        (1.0, 1.0, 1e7, True, 1e-2),
        (1.0, 1.0, 1e5, None, 1e-2),
        (1.0, 19.0, 4.0, False, 1.0),
        (1.0, 0.05, 1.0, False, 1.0),
        (1.0, 1e-4, 1.0, False, (32e-4) ** 2),
        (1.0, 1e-6, 1.0, False, 1e-6 / 19),
        (1e-6, 19e-6, 1.0, False, 1e-6 / 19),  # long after it has become weak
        (0.0, 0.0, 1.0, None, 1.0),
        (float("nan"), 1.0, 1.0, None, 1.0),
        (float("inf"), 1.0, 1.0, None, 1.0),
    ],
)
def test_weaker_gradients_are_trusted_less(average, now, strongest, noisy, expected):
    assert GradientEnergy(average, now, noisy).trust(strongest) == pytest.approx(expected)


@pytest.mark.parametrize(
    "strange",
    [
        {"exp_avg": None},
        {"exp_avg_sq": (torch.ones(3), torch.ones(2))},
        {"exp_avg_sq": torch.ones(3, 4, dtype=torch.uint8)},
        {"step": torch.ones(3)},
        {"betas": 0.9},
        {"betas": torch.tensor([0.9, 0.99])},
        {"betas": (0.9, None)},
    ],
    ids=str,
)
def test_other_states_of_an_optimizer_tell_nothing(strange, tmp_path):
    class Own(optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "betas": strange.get("betas", (0.9, 0.999))})

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])
                    plain = {"exp_avg": parameter.grad.clone(), "exp_avg_sq": parameter.grad.square(), "step": 1}
                    self.state[parameter].update(plain | {k: v for k, v in strange.items() if k != "betas"})

    model = nn.Linear(4, 3)
    optimizer = Own(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        assert checkpointer.save(1).result().step == 1
    assert gradient_energy({"w": model.weight}, [optimizer], {}, WHOLE) == GradientEnergy()


def test_one_strange_gradient_does_not_count_in_full():
    assert GradientEnergy(1e9, 1.0, True).strongest(1.0) == 10.0
    assert GradientEnergy(1e9, 1.0, True).strongest(0.0) == 1e9
    assert GradientEnergy(0.5, 1.0, True).strongest(1.0) == 1.0
    assert GradientEnergy().strongest(1.0) == 1.0


def test_a_long_interval_does_not_hide_that_gradients_of_sgd_have_become_weak(tmp_path):
    training = Exact(lambda p: optim.SGD(p, 0.1, momentum=0.9))
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        training.train(10)
        checkpointer.save(10).result()
        training.train(6000)
        checkpointer.save(6010).result()
        before = training.loss().item()
        checkpointer.restore()
        assert training.loss().item() < 1.2 * before
