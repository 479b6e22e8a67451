"""Half-precision weights and their master weights: pairs are stored once; look-alikes are not pairs."""

import pytest
import torch
from torch import nn, optim
from training import bits

import dynaquant as dq
from dynaquant.store.run import Run

STEP = 1


class Holder:
    """An object whose state is a dictionary of tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        for name, tensor in state.items():
            with torch.no_grad():
                self.tensors[name].copy_(tensor)


def half_model(dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(40, 30, bias=False).to(dtype)


def stored(folder, *objects, **settings) -> dict:
    """Save these objects. Returns the state that ``load`` returns."""
    with dq.Checkpointer(folder, *objects, **settings) as ckpt:
        ckpt.save(STEP).result()
    return dq.load(folder)


def size(folder) -> int:
    return sum(file.stat().st_size for file in folder.glob("step-*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", ["as parameters", "in the state"])
def test_a_weight_and_its_master_weights_in_an_optimizer_are_stored_once(tmp_path, dtype, kept):
    model = half_model(dtype)
    master = model.weight.detach().float().requires_grad_()
    if kept == "as parameters":
        optimizer, extras = optim.SGD([master]), {"masters": Holder(weight=master)}
    else:
        optimizer, extras = optim.SGD(model.parameters()), {}
        optimizer.state[model.weight]["master"] = master.detach()
    state = stored(tmp_path / "paired", model, optimizer, extras=extras, quality="lossless")
    assert bits(state["model"]) == bits(model.state_dict())
    with torch.no_grad():
        master += 1  # no longer rounds to the weight
    stored(tmp_path / "apart", model, optimizer, extras=extras, quality="lossless")
    assert size(tmp_path / "paired") < size(tmp_path / "apart") - model.weight.nbytes / 2


def test_no_note_takes_master_weights_for_an_average(tmp_path):
    model = half_model()
    masters = nn.ParameterList([model.weight.detach().float()])
    with dq.Checkpointer(tmp_path, model, optim.SGD(masters.parameters()), extras={"masters": masters}) as ckpt:
        record = ckpt.save(STEP).result()
    assert record.roles["weight"].raw == model.weight.nbytes + masters[0].nbytes
    assert record.notes == []


def test_a_zero_with_another_sign_is_another_value(tmp_path):
    model = half_model()
    with torch.no_grad():
        model.weight[0, 0] = -0.0
    master = model.weight.detach().float()
    master[0, 0] = 0.0
    optimizer = optim.SGD([master.requires_grad_()])
    extras = {"masters": Holder(weight=master)}
    state = stored(tmp_path, model, optimizer, extras=extras, quality="lossless")
    assert bits(state["model"]) == bits(model.state_dict())
    assert bits(state["masters"]) == bits(extras["masters"].tensors)


def test_an_average_of_constant_weights_does_not_count_as_master_weights(tmp_path):
    model = half_model()
    average = model.weight.detach().float()
    state = stored(tmp_path, model, optim.SGD(model.parameters()), extras={"ema": Holder(weight=average)})
    assert bits(state["ema"]) == bits({"weight": average})


def test_master_weights_that_a_pattern_makes_exact_are_exact(tmp_path):
    model = half_model()
    master = model.weight.detach().float() * (1 + 2**-12)
    assert torch.equal(master.bfloat16(), model.weight)
    optimizer = optim.SGD([master.requires_grad_()])
    extras = {"masters": Holder(weight=master)}
    state = stored(tmp_path, model, optimizer, extras=extras, roles={"masters.*": "exact"})
    assert bits(state["masters"]) == bits(extras["masters"].tensors)


def test_weights_that_begin_alike_get_the_master_weights_that_are_theirs(tmp_path):
    masters = [torch.cat((torch.ones(2000), torch.full((48,), end))).view(32, 64) for end in (1.0, 2.0, 3.0)]
    model = nn.ParameterList(nn.Parameter(masters[i].bfloat16()) for i in (1, 2, 0))
    optimizer = optim.SGD([master.requires_grad_() for master in masters])
    extras = {"masters": Holder(**{str(i): master for i, master in enumerate(masters)})}
    with dq.Checkpointer(tmp_path, model, optimizer, extras=extras) as ckpt:
        ckpt.save(STEP).result()
    found = {entry.name: entry.scheme for entry in Run(tmp_path).file(STEP).header.entries}
    assert [found[f"model.{i}"].depends_on for i in range(3)] == ["masters.1", "masters.2", "masters.0"]


def test_the_sensitivity_of_the_loss_comes_from_the_moments_of_master_weights(tmp_path):
    model = half_model()
    master = model.weight.detach().float().requires_grad_()
    optimizer = optim.AdamW([master])
    master.grad = torch.randn_like(master)
    optimizer.step()
    with torch.no_grad():
        model.weight.copy_(master)
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"masters": Holder(weight=master)}) as ckpt:
        assert ckpt.save(STEP).result().judged_by == "fisher distortion"


def test_a_parameter_is_distinguished_from_a_larger_one_that_contains_it(tmp_path):
    flat = torch.randn(2400)
    model = nn.ParameterList(flat.view(2, 40, 30).unbind())
    optimizer = optim.AdamW([flat])
    flat.grad = torch.randn(2400)
    optimizer.step()
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.save(STEP).result().judged_by == "distortion"  # the gradient of the parts is unknown


def test_master_weights_that_are_not_saved_cause_a_warning(tmp_path, caplog):
    model = half_model()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = optim.AdamW(masters)
    extras = {"masters": nn.ParameterList(masters), "other": optim.SGD(model.parameters())}
    with dq.Checkpointer(tmp_path / "with", model, optimizer, extras=extras):
        assert caplog.messages == []
    with dq.Checkpointer(tmp_path / "without", model, optimizer):
        (said,) = caplog.messages
    assert said.startswith("optimizer updates tensors that are not saved")
    assert "master weights" in said


def test_an_optimizer_of_another_model_is_not_taken_for_one_of_master_weights(tmp_path, caplog):
    for model, other in ((nn.Linear(4, 4), nn.Linear(4, 4)), (half_model(), nn.Linear(5, 3))):
        caplog.clear()
        with dq.Checkpointer(tmp_path, model, optim.AdamW(other.parameters())):
            (said,) = caplog.messages
        assert "if they belong to another model, give that too" in said
        assert "master" not in said


class Doubled(nn.Linear):
    """A layer that stores twice its weight, under another name."""

    def __init__(self):
        super().__init__(8, 8, bias=False)
        self.register_state_dict_post_hook(lambda _, state, *__: state.update(twice=2 * state.pop("weight")))
        self.register_load_state_dict_pre_hook(lambda _, state, *__: state.update(weight=state.pop("twice") / 2))


def test_a_parameter_that_a_hook_drops_from_the_state_dict_is_named(tmp_path, caplog):
    model = nn.Linear(8, 8)
    model.register_state_dict_post_hook(lambda _, state, *__: state.__delitem__("bias"))
    optimizer = optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    with dq.Checkpointer(tmp_path, model, optimizer):
        (said,) = caplog.messages
    assert said.startswith(
        "state_dict() does not have model.bias: a hook of the module drops it, so a restore would not"
    )


def test_a_parameter_that_a_hook_replaces_in_the_state_dict_is_named_and_stored_exactly(tmp_path, caplog):
    model = Doubled()
    optimizer = optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    wanted = model.weight.detach().clone()
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        (said,) = caplog.messages
        ckpt.save(STEP).result()
        nn.init.zeros_(model.weight)
        ckpt.restore()
    assert said.startswith("state_dict() does not have model.weight: a hook of the module gives something else")
    assert torch.equal(model.weight, wanted)


def halved(_, state, *__):
    state.update({name: value.half() for name, value in state.items()})


def test_parameters_that_a_hook_stores_in_float16_are_restored_as_it_gives_them(tmp_path, caplog):
    model = nn.Linear(8, 8)
    model.register_state_dict_post_hook(halved)
    optimizer = optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    wanted = model.weight.detach().half().float()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        (said,) = caplog.messages
        ckpt.save(STEP).result()
        nn.init.zeros_(model.weight)
        optimizer.state[model.weight]["exp_avg"].zero_()
        ckpt.restore()
    assert "model.weight and 1 other parameters: a hook of the module gives other values in its place (float16)" in said
    assert torch.equal(model.weight, wanted)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)


def test_copies_in_a_state_dict_are_as_good_as_the_parameters(tmp_path, caplog):
    model = nn.Linear(8, 8)
    model.register_state_dict_post_hook(lambda _, state, *__: state.update({n: v.clone() for n, v in state.items()}))
    optimizer = optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        wanted = model.weight.detach().clone()
        ckpt.save(STEP).result()
        nn.init.zeros_(model.weight)
        ckpt.restore()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert torch.equal(model.weight, wanted)
