"""Weights of tensor subclasses, such as 4-bit ones: restored bit for bit, or refused before training begins."""

import copy
import json

import pytest
import torch
import torch.distributed.tensor
from commands import call
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import dynaquant as dq

INPUTS, TARGETS = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)), torch.zeros(16, 4)


class Low(TwoTensor):
    """Another class with the same parts."""


class Scales:
    """What a packed parameter keeps beside its values, as bitsandbytes has it: tensors, and a text of plain values."""

    def __init__(self, scale, offset):
        self.scale, self.offset = scale, offset

    def as_dict(self):
        text = json.dumps({"offset": self.offset}).encode()
        return {"scale": self.scale, "quant_state.plain": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    @classmethod
    def from_dict(cls, found, device):
        plain = json.loads(bytes(found.pop("quant_state.plain").tolist()))
        return cls(found["scale"].to(device), plain["offset"])


class PackedWeight(nn.Parameter):
    """Weights in 8 bits. The class has a state of its own."""

    def __new__(cls, weight):
        offset = float(weight.mean())
        scale = (weight - offset).abs().amax(1, keepdim=True) / 127
        found = Tensor._make_subclass(cls, ((weight - offset) / scale).round().to(torch.int8), False)
        found.quant_state = Scales(scale, offset)
        return found


class PackedLinear(nn.Module):
    """A layer that adds the state of its weight to the state dict, where PyTorch does not load it."""

    def __init__(self, layer):
        super().__init__()
        self.weight = PackedWeight(layer.weight.detach())

    def forward(self, inputs):
        state = self.weight.quant_state
        return inputs @ (self.weight * state.scale + state.offset).T

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}weight.{key}": each for key, each in self.weight.quant_state.as_dict().items()})


def wrapped(layer, kind=TwoTensor):
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(kind(weight, weight.round(decimals=1)), requires_grad=False)
    return layer


def of_torchao(layer):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def of_bitsandbytes(layer):
    linear = pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 32, quant_type="nf4")
    linear.load_state_dict(layer.state_dict())
    return linear.to("cpu")


KINDS = [wrapped, PackedLinear, of_torchao, of_bitsandbytes]


class Adapted(nn.Module):
    """A frozen base in few bits, and adapters that train."""

    def __init__(self, kind, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base = kind(nn.Linear(64, 32, bias=kind is not PackedLinear)).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(64, 4), nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, inputs):
        return self.head(self.base(inputs) + self.up(self.down(inputs)))


def loss(model, _=None):
    return nn.functional.mse_loss(model(INPUTS), TARGETS)


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def trained(folder, model, steps=(1, 2), **options):
    optimizer = optimizer_of(model)
    with dq.Checkpointer(folder, model, optimizer, evaluate=dq.LossOn([0, 1, 2, 3], loss), **options) as ckpt:
        for step in steps:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.save(step)
        return ckpt.records()


def restored(folder, model, **options):
    with dq.Checkpointer(folder, model, optimizer_of(model)) as ckpt:
        assert ckpt.restore(**options)
        return ckpt.not_restored


def base_of(model):
    return {key: value for key, value in dq.state.wrappers.state_dict(model).items() if key.startswith("base.")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_frozen_base_comes_back_bit_for_bit(tmp_path, kind, quality):
    model, fresh = Adapted(kind, 0), Adapted(kind, 1)
    records = trained(tmp_path, model, quality=quality)
    assert not same(base_of(fresh), base_of(model))
    restored(tmp_path, fresh)
    assert same(base_of(fresh), base_of(model))
    assert torch.equal(fresh.base(INPUTS), model.base(INPUTS))
    assert quality == "balanced" or torch.equal(fresh(INPUTS), model(INPUTS))
    assert records[-1].roles["exact"].stored < 200, "what is frozen has not changed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_everybody_has_can_be_left_out(tmp_path, kind):
    trained(tmp_path, Adapted(kind, 0), roles={"model.base.*": "omit"})
    restored(tmp_path, Adapted(kind, 0))
    with pytest.raises(dq.StateError, match=r"model\.base\.weight.* is not stored \(role 'omit'\), and its values"):
        restored(tmp_path, Adapted(kind, 1))


def test_a_pattern_with_the_name_of_a_wrapped_weight_selects_its_parts(tmp_path):
    trained(tmp_path, Adapted(wrapped, 0), roles={"model.base.weight": "omit"})
    assert {"base.weight.a", "base.weight.b"}.isdisjoint(dq.load(tmp_path)["model"])
    model = Adapted(wrapped, 0)
    model.base.weight.requires_grad_()
    with pytest.raises(dq.StateError, match=r"model\.base\.weight\.a has role 'omit', but it trains"):
        trained(tmp_path / "b", model, roles={"model.base.weight": "omit"})


def test_a_wrapped_weight_of_another_class_is_left_out_as_a_whole(tmp_path):
    trained(tmp_path, Adapted(wrapped, 0))
    other = Adapted(lambda layer: wrapped(layer, Low), 1)
    before = copy.deepcopy(base_of(other))
    for load in (lambda: restored(tmp_path, other), lambda: dq.load_into(other, tmp_path)):
        with pytest.raises(dq.StateError, match=r"base\.weight was of class TwoTensor and is of class Low"):
            load()
    assert len(restored(tmp_path, other, strict=False)) == 1
    assert torch.equal(base_of(other)["base.bias"], dq.load(tmp_path)["model"]["base.bias"])
    assert all(torch.equal(base_of(other)[key], before[key]) for key in ("base.weight.a", "base.weight.b"))


@pytest.mark.parametrize("kind", KINDS)
def test_other_models_are_filled_or_say_why_not(tmp_path, kind):
    model = Adapted(kind, 0)
    trained(tmp_path, model, quality="lossless")
    alike = Adapted(kind, 0)
    nn.init.zeros_(alike.head.weight)
    assert next(dq.follow(tmp_path, alike)) == 2
    assert torch.equal(alike(INPUTS), model(INPUTS))
    if kind in (PackedLinear, of_bitsandbytes):  # the rest of its state cannot be filled in place
        with pytest.raises(dq.StateError, match=r"belongs to base\.weight, .* load the same base model first"):
            dq.load_into(Adapted(kind, 1), tmp_path)
    else:
        dq.load_into(other := Adapted(kind, 1), tmp_path)
        assert torch.equal(other(INPUTS), model(INPUTS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_an_export_says_which_weights_no_plain_program_loads(tmp_path, kind, name):
    trained(tmp_path / "run", Adapted(kind, 0))
    said = " ".join(call("export", tmp_path / "run", "-o", tmp_path / name).split())
    wrapper = kind in (wrapped, of_torchao)
    assert ("in place of weights of tensor classes, such as base.weight (" in said) == wrapper
    assert ("dynaquant.load_into" in said) == wrapper


class Named(nn.Parameter):
    """A subclass without tensors of its own, as many packages have one."""

    def __new__(cls, data, label=None):
        found = Tensor._make_subclass(cls, data, True)
        found.label = label
        return found


class NeedsItsClass(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) if self.weight.label == "mine" else None


def test_a_subclass_without_a_state_is_a_weight_as_any_other(tmp_path):
    """``evaluate`` sees its class and its attributes, too."""

    def model_of(seed):
        torch.manual_seed(seed)
        model = NeedsItsClass(64, 4)
        model.weight = Named(model.weight.detach(), "mine")
        model.weight.main_grad = torch.ones(4, 64)  # as Megatron has it, in no state dict
        return model

    records = trained(tmp_path, model_of(0))
    assert records[-1].roles["weight"].raw == 4 * (64 * 4 + 4)
    restored(tmp_path, fresh := model_of(1))
    assert torch.equal(fresh.weight, dq.load(tmp_path)["model"]["weight"])
    assert isinstance(fresh.weight, Named)


class Scaled(Named):
    """A subclass whose scale is in no state dict."""


class Loose(PackedLinear):
    """A layer that adds to the state dict what nothing loads."""

    def __init__(self, layer):
        super().__init__(layer)
        self.weight = Named(self.weight.detach().float())
        self.weight.extra = torch.ones(3)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[f"{prefix}weight.extra"] = self.weight.extra


def scaled():
    layer = nn.Linear(4, 4)
    layer.weight = Scaled(layer.weight.detach())
    layer.weight.scale = torch.ones(3)
    return layer


def with_weight(weight):
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (scaled, r"model\.0\.weight is a .*Scaled, whose 'scale' is not in the model's state_dict\(\), .* register it"),
        (lambda: Loose(nn.Linear(4, 4)), r"model\.0\.weight is a .*Named, and 0\.weight\.extra .* does not take it"),
        (lambda: nn.LazyLinear(3), r"model\.0\.weight has no shape yet .*; call the model once"),
        (lambda: with_weight(torch.eye(2).to_sparse()), r"model\.0\.weight: a sparse_coo tensor .* make it dense"),
        (lambda: with_weight(torch.nested.nested_tensor([torch.ones(2)])), r"model\.0\.weight: a nested tensor .* pad"),
        (
            lambda: with_weight(torch.masked.masked_tensor(torch.ones(2), torch.ones(2, dtype=torch.bool))),
            r"model\.0\.weight: a tensor of class .*MaskedTensor cannot be stored; wrap its owner",
        ),
        (
            lambda: with_weight(TwoTensor(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())),
            r"model\.0\.weight\.a: a sparse_coo tensor",
        ),
    ],
    ids=["attribute", "nothing loads it", "lazy", "sparse", "nested", "masked", "sparse inside"],
)
def test_what_could_not_be_restored_is_refused_at_once(tmp_path, layer, message):
    with pytest.raises(dq.StateError, match=message):
        dq.Checkpointer(tmp_path, nn.Sequential(layer()))


def test_a_divided_weight_of_such_a_class_is_refused_at_once(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        local = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
        layer = with_weight(torch.distributed.tensor.DTensor.from_local(local, mesh, run_check=False))
        with pytest.raises(dq.StateError, match=r"model\.0\.weight is divided .*, and each holds a TwoTensor of it"):
            dq.Checkpointer(tmp_path / "run", nn.Sequential(layer))
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapped_weight_that_trains_is_stored_exactly(tmp_path, caplog):
    def model_of(seed):
        torch.manual_seed(seed)
        layer = wrapped(nn.Linear(64, 4))
        layer.weight.requires_grad_()
        return layer

    model, fresh = model_of(0), model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.a.clone()
    with dq.Checkpointer(tmp_path, model, optimizer, every=dq.Moved(0.001)) as ckpt:
        for step in (1, 2):
            model(INPUTS).square().mean().backward()
            optimizer.step()
            ckpt.due(step)
            ckpt.save(step)
    assert not torch.equal(model.weight.a, before)
    with dq.Checkpointer(tmp_path, fresh, torch.optim.SGD(fresh.parameters(), lr=0.1)) as ckpt:
        ckpt.restore()
    assert torch.equal(fresh.weight.a, model.weight.a)
    assert torch.equal(fresh.weight.b, model.weight.b)
    assert "state_dict() does not have" not in caplog.text


def test_a_state_in_memory_with_a_subclass_is_refused(tmp_path):
    with pytest.raises(dq.StateError, match=r"^w: a tensor of class .*TwoTensor cannot be stored"):
        dq.save({"w": TwoTensor(torch.ones(2), torch.ones(2))}, tmp_path / "a.dqc")


class Refuses(nn.Linear):
    def _load_from_state_dict(self, *_):
        raise RuntimeError("not today")


@pytest.mark.parametrize("kind", [wrapped, PackedLinear])
def test_a_failed_restore_puts_back_what_belongs_to_weights(tmp_path, kind):
    def model_of(seed, last):
        model = nn.Sequential(Adapted(kind, seed), nn.Linear(4, 4))
        model[1].__class__ = last
        return model

    with dq.Checkpointer(tmp_path, model_of(0, nn.Linear)) as ckpt:
        ckpt.save(1)
    model = model_of(1, Refuses)
    with dq.Checkpointer(tmp_path, model) as ckpt, pytest.raises(RuntimeError, match="not today"):
        ckpt.restore()
    expected = Adapted(kind, 1)
    assert same(base_of(model[0]), base_of(expected))
