"""A restore that fails while it loads puts everything back, whoever raises."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import bits

import dynaquant as dq
from dynaquant.restore import restorer


class FailureError(Exception):
    pass


class Switch:
    """Fails when it is armed: with an error every time, with an interrupt once."""

    armed: BaseException | None = None

    def check(self):
        error = self.armed
        if isinstance(error, KeyboardInterrupt):
            self.armed = None
        if error is not None:
            raise error


class Model(nn.Module):
    """Code of its own takes part in loading: the last layer fails, before or after it has loaded."""

    def __init__(self, switch, when):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), Last(switch, when)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs):
        self.seen += 1
        return self.last(self.middle(self.first(inputs)))


class Last(nn.Linear):
    def __init__(self, switch, when):
        super().__init__(6, 4)
        self.switch, self.when, self.history, self.count = switch, when, [], 0
        if when == "hook of the model":
            self.register_load_state_dict_post_hook(lambda *_: switch.check())

    def get_extra_state(self):
        return {"history": list(self.history), "count": self.count}

    def set_extra_state(self, state):
        self.history[:] = state["history"]
        self.count = state["count"]
        if self.when == "extra state of the model":
            self.switch.check()

    def _load_from_state_dict(self, *arguments):
        if self.when == "layer before it loads":
            self.switch.check()
        super()._load_from_state_dict(*arguments)
        if self.when == "layer after it has loaded":
            self.switch.check()


class Optimizer(torch.optim.Adam):
    def __init__(self, parameters, switch, when):
        super().__init__(parameters, 1e-2)
        self.switch, self.when, self.phases = switch, when, ["new"]
        if when == "hook of the optimizer":
            self.register_load_state_dict_post_hook(lambda _: switch.check())

    def state_dict(self):
        return {**super().state_dict(), "phases": self.phases}

    def load_state_dict(self, state_dict):
        if self.when == "optimizer before it loads":
            self.switch.check()
        self.phases[:] = state_dict["phases"]
        for slot in (slot for slots in self.state.values() for slot in slots.values() if self.switch.armed is not None):
            slot.fill_(7)  # into the tensors that the optimizer has
        super().load_state_dict(state_dict)
        if self.when == "optimizer after it has loaded":
            self.switch.check()


class Extra:
    def __init__(self, switch, when):
        self.switch, self.when, self.epoch = switch, when, 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        random.random()
        if self.when == "extra":
            self.switch.check()


WHO = [
    *("extra", "layer before it loads", "layer after it has loaded", "extra state of the model", "hook of the model"),
    *("optimizer before it loads", "optimizer after it has loaded", "hook of the optimizer"),
]


class Training:
    def __init__(self, when="", seed=0, steps=0):
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(seed)
        self.switch = Switch()
        self.model = Model(self.switch, when)
        self.optimizer = Optimizer(self.model.parameters(), self.switch, when)
        self.extras = {
            "average": nn.Linear(3, 3),
            "progress": {"epoch": seed, "losses": [float(seed)], "best": torch.full((2,), float(seed))},
            "order": torch.Generator().manual_seed(seed),
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 1 + seed),
            "position": Extra(self.switch, when),
        }
        self.extras["position"].epoch = seed
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 4)).square().mean().backward()
            self.optimizer.step()
            self.model.last.history.append(step)
            self.model.last.count += 1
            self.optimizer.phases.append(f"step {step}")

    def checkpointer(self, folder, **options):
        return dq.Checkpointer(folder, self.model, self.optimizer, extras=self.extras, **options)

    def state(self):
        """Return everything that a restore may change, and which objects hold it."""
        tensors = [*self.model.state_dict(keep_vars=True).values(), *self.extras["average"].parameters()]
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        named = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        progress = self.extras["progress"]
        containers = [self.optimizer.phases, self.model.last.history, progress, progress["losses"], progress["best"]]
        groups = self.optimizer.param_groups
        return (
            bits([self.model.state_dict(), self.optimizer.state_dict(), self.extras["average"].state_dict()]),
            bits([progress, self.extras["scheduler"].state_dict(), self.extras["position"].epoch]),
            bits([self.extras["order"].get_state(), torch.get_rng_state(), np.random.get_state(), random.getstate()]),
            [id(each) for each in [*named, *slots, *containers, *groups, *self.optimizer.state]],
            [(each.data_ptr(), each.requires_grad) for each in named],
        )


@pytest.mark.parametrize("error", [FailureError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("steps", [0, 3], ids=["new", "trained"])
@pytest.mark.parametrize("who", WHO)
def test_everything_is_put_back_whoever_raises(tmp_path, who, steps, strict, error):
    saved = Training(seed=1, steps=4)
    with saved.checkpointer(tmp_path, quality="lossless") as ckpt:
        ckpt.save(4)
    training = Training(who, seed=2, steps=steps)
    with training.checkpointer(tmp_path, quality="lossless") as ckpt:
        before = training.state()
        training.switch.armed = error
        with pytest.raises(type(error)):
            ckpt.restore(strict=strict)
        assert training.state() == before
        training.switch.armed = None
        assert ckpt.restore(strict=strict) == 4
    assert bits(training.model.state_dict()) == bits(saved.model.state_dict())
    assert bits(training.optimizer.state_dict()) == bits(saved.optimizer.state_dict())


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_plain_model_is_put_back_too(tmp_path, quality):
    def training(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
        model[0].weight.requires_grad_(seed == 1)
        return model, Failing(model.parameters(), 0.1)

    class Failing(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            self.param_groups[0]["lr"] = 3.0
            model[0].weight.data = torch.zeros(3)  # not the module's own code
            raise FailureError(state_dict)

    with dq.Checkpointer(tmp_path, *training(1), quality=quality) as ckpt:
        ckpt.save(1)
    model, optimizer = training(2)
    weight = model[0].weight
    before = bits(model.state_dict()), weight.data_ptr(), weight.stride(), weight.requires_grad
    with dq.Checkpointer(tmp_path, model, optimizer, quality=quality) as ckpt, pytest.raises(FailureError):
        ckpt.restore()
    assert (bits(model.state_dict()), weight.data_ptr(), weight.stride(), weight.requires_grad) == before
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_interrupt_where_only_pytorch_loads_comes_after_a_whole_restore(tmp_path, monkeypatch):
    """Nothing can fail there, and a copy of all tensors would double the memory of a restore."""

    def training(seed):
        torch.manual_seed(seed)
        model = nn.Linear(30, 30)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(seed):
            model(torch.randn(4, 30)).square().mean().backward()
            optimizer.step()
        return model, optimizer

    def interrupted(target, stored):
        monkeypatch.undo()
        restorer.fill(target, stored)
        raise KeyboardInterrupt

    saved, trained = training(1), training(2)
    with dq.Checkpointer(tmp_path, *saved, quality="lossless") as ckpt:
        ckpt.save(1)
    monkeypatch.setattr(restorer, "fill", interrupted)
    with dq.Checkpointer(tmp_path, *trained, quality="lossless") as ckpt, pytest.raises(KeyboardInterrupt):
        ckpt.restore()
    assert [bits(thing.state_dict()) for thing in trained] == [bits(thing.state_dict()) for thing in saved]
