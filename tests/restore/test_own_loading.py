"""Modules that decide themselves what to load: they may take a state of another size or kind than the present one."""

import json

import pytest
import torch
from torch import nn
from torch.ao.quantization import HistogramObserver, PerChannelMinMaxObserver
from training import bits

import dynaquant as dq


class Scaled(nn.Linear):
    """Remembers the largest inputs, as FP8 layers do."""

    def __init__(self, form):
        super().__init__(8, 4)
        self.form, self.history = form, []

    def forward(self, inputs):
        self.history.append(float(inputs.abs().max()))
        return super().forward(inputs)

    def get_extra_state(self):
        if self.form == "bytes":
            return torch.frombuffer(bytearray(json.dumps(self.history).encode()), dtype=torch.uint8).clone()
        return None if self.form == "none first" and not self.history else {"history": list(self.history)}

    def set_extra_state(self, state):
        values = json.loads(bytes(state.numpy())) if self.form == "bytes" else (state or {"history": []})["history"]
        self.history = list(values)


class Growing(nn.Module):
    """Keeps a buffer that grows, and takes one of any size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, inputs):
        self.seen = torch.cat([self.seen, inputs[0, :2]])
        return self.layer(inputs)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def observed(observer):
    return nn.Sequential(nn.Linear(8, 4), observer)


MODELS = {
    "dictionary": lambda: Scaled("dictionary"),
    "bytes": lambda: nn.Sequential(Scaled("bytes")),
    "none first": lambda: Scaled("none first"),
    "growing": Growing,
    "per channel": lambda: observed(PerChannelMinMaxObserver()),
    "histogram": lambda: observed(HistogramObserver()),
}


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_model_takes_its_state(tmp_path, name, quality):
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer, quality=quality) as ckpt:
        train(model, optimizer)
        ckpt.save(3)
    other = MODELS[name]()
    other_optimizer = torch.optim.AdamW(other.parameters())
    with dq.Checkpointer(tmp_path, other, other_optimizer, quality=quality) as ckpt:
        ckpt.restore()
        assert bits(other.state_dict()) == bits(dq.load(tmp_path)["model"])
        train(other, other_optimizer, 2)
        ckpt.restore()
    assert bits(other.state_dict()) == bits(dq.load(tmp_path)["model"])


def test_a_module_that_refuses_the_state_leaves_everything_as_it_was(tmp_path):
    with dq.Checkpointer(tmp_path, nn.Sequential(nn.Linear(3, 3), Growing()), quality="lossless") as ckpt:
        ckpt.save(1)

    class Refusing(Growing):
        def _load_from_state_dict(self, *arguments):
            self.seen = torch.ones(7)
            super()._load_from_state_dict(*arguments)
            raise RuntimeError("of no use")

    model = nn.Sequential(nn.Linear(3, 3), Refusing())
    before = bits(model.state_dict())
    with dq.Checkpointer(tmp_path, model, quality="lossless") as ckpt, pytest.raises(RuntimeError, match="of no use"):
        ckpt.restore()
    assert bits(model.state_dict()) == before


class Renaming(nn.Module):
    """A later version of a sequence of one layer: it renames what it loads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_load_state_dict_pre_hook(Renaming.rename)

    def rename(self, state, prefix, *_):
        for key in [key for key in state if key.startswith(f"{prefix}0.")]:
            state[f"{prefix}layer.{key.removeprefix(f'{prefix}0.')}"] = state.pop(key)

    def forward(self, inputs):
        return self.layer(inputs)


def test_a_model_that_renames_keys_is_told_to_load_as_pytorch_does(tmp_path):
    model, other = nn.Sequential(nn.Linear(8, 4)), Renaming()
    optimizer, other_optimizer = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        train(model, optimizer)
        ckpt.save(3)
    advice = r"may rename them: if so, state = dq\.load\(…\), model\.load_state_dict\(state\['model'\]\)"
    with pytest.raises(dq.StateError, match=advice):
        dq.load_into(other, tmp_path)
    with dq.Checkpointer(tmp_path, other, other_optimizer) as ckpt, pytest.raises(dq.StateError, match=advice):
        ckpt.restore()
    state = dq.load(tmp_path)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    assert torch.equal(other.layer.weight, model[0].weight)
    moments = (o.state[p]["exp_avg"] for o, p in ((optimizer, model[0].weight), (other_optimizer, other.layer.weight)))
    assert torch.equal(*moments)
    with pytest.raises(dq.StateError) as caught:
        dq.load_into(nn.Linear(8, 4), tmp_path)
    assert "may rename them" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_scripted_module_is_refused_with_advice(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    scripted = torch.jit.script(model)
    for given in (scripted, nn.Sequential(nn.Linear(2, 2), scripted)):
        with pytest.raises(dq.StateError, match=r"is a module of torch\.jit; give the module that was scripted"):
            dq.Checkpointer(tmp_path, given)
    assert scripted.state_dict()["0.weight"].data_ptr() == model[0].weight.data_ptr()
