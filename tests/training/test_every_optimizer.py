"""Optimizers: which tensors of their states are quantized, how precisely, and training after a restore."""

import copy
import math

import numpy as np
import pytest
import torch
from optimizer_moments import first_effect
from torch import nn
from training import bits, model_of, named_state

from dynaquant import Checkpointer, load
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.saving.presets import PRESETS
from dynaquant.state.flatten import flatten
from dynaquant.state.roles import labels
from dynaquant.training.collect import collect

STEPS = 12


class ByParameter(torch.optim.Optimizer):
    """Updates each parameter that has a gradient, independently of the others."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.update(p, self.state[p], group)


class Lion(ByParameter):
    """The sign of a moving average of gradients; the only state is ``exp_avg``."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    def update(self, p, state, group):
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.sub_(torch.sign(average.lerp(p.grad, 1 - group["betas"][0])), alpha=group["lr"])
        average.lerp_(p.grad, 1 - group["betas"][1])


class Adam8Bit(ByParameter):
    """Stores moments as bytes with one scale per tensor, under the usual names of moments."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    def update(self, p, state, group):
        if not state:
            state["exp_avg"] = torch.full_like(p, 128, dtype=torch.uint8)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.uint8)
            state["absmax1"], state["absmax2"] = torch.zeros(1), torch.zeros(1)
        first = (state["exp_avg"].float() - 128) / 127 * state["absmax1"]
        second = (state["exp_avg_sq"].float() / 255) ** 2 * state["absmax2"]
        first.lerp_(p.grad, 0.1)
        second.lerp_(p.grad.square(), 0.01)
        p.sub_(first / (second.sqrt() + 1e-3), alpha=group["lr"])
        state["absmax1"], state["absmax2"] = first.abs().max().reshape(1), second.max().reshape(1)
        state["exp_avg"] = (first / state["absmax1"].clamp(min=1e-30) * 127 + 128).round().to(torch.uint8)
        state["exp_avg_sq"] = ((second / state["absmax2"].clamp(min=1e-30)).sqrt() * 255).ceil().to(torch.uint8)


class MasterAdam(ByParameter):
    """Adam for half-precision parameters: moments and master weights in float32."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    def update(self, p, state, group):
        if not state:
            state["master"] = p.float()
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros(2, *p.shape).unbind()
        state["exp_avg"].lerp_(p.grad.float(), 0.1)
        state["exp_avg_sq"].lerp_(p.grad.float().square(), 0.01)
        state["master"].sub_(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8), alpha=group["lr"])
        p.copy_(state["master"])


ADAM = {"exp_avg", "exp_avg_sq"}
UNKNOWN_UPDATE = {"Adamax", "Lion"}
"""Optimizers with only first moments, which are not the update itself. A preset may store these exactly."""
optim = torch.optim
OPTIMIZERS = {
    "AdamW": (lambda p: optim.AdamW(p, 1e-3), ADAM),
    "Adam": (lambda p: optim.Adam(p, 1e-3), ADAM),
    "Adam amsgrad": (lambda p: optim.Adam(p, 1e-3, amsgrad=True), {*ADAM, "max_exp_avg_sq"}),
    "Adam foreach": (lambda p: optim.Adam(p, 1e-3, foreach=True), ADAM),
    "Adam fused": (lambda p: optim.Adam(p, 1e-3, fused=True), ADAM),
    "AdamW fused amsgrad": (lambda p: optim.AdamW(p, 1e-3, fused=True, amsgrad=True), {*ADAM, "max_exp_avg_sq"}),
    "Adam capturable": (lambda p: optim.Adam(p, 1e-3, capturable=True), ADAM),
    "SGD": (lambda p: optim.SGD(p, 0.1), set()),
    "SGD momentum": (lambda p: optim.SGD(p, 0.05, momentum=0.9), {"momentum_buffer"}),
    "SGD nesterov": (lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True), {"momentum_buffer"}),
    "RMSprop": (lambda p: optim.RMSprop(p, 1e-3), {"square_avg"}),
    "RMSprop centered": (lambda p: optim.RMSprop(p, 1e-3, centered=True), set()),
    "RMSprop momentum": (lambda p: optim.RMSprop(p, 1e-3, momentum=0.9), {"square_avg", "momentum_buffer"}),
    "RMSprop both": (lambda p: optim.RMSprop(p, 1e-3, momentum=0.9, centered=True), {"momentum_buffer"}),
    "Adagrad": (lambda p: optim.Adagrad(p, 1e-2), {"sum"}),
    "NAdam": (lambda p: optim.NAdam(p, 1e-3), ADAM),
    "RAdam": (lambda p: optim.RAdam(p, 1e-3), ADAM),
    "Adamax": (lambda p: optim.Adamax(p, 1e-3), {"exp_avg"}),
    "Adadelta": (lambda p: optim.Adadelta(p, 1.0), {"square_avg"}),
    "Adafactor": (lambda p: optim.Adafactor(p, 1e-2), set()),
    "Muon": (lambda p: optim.Muon(p, 1e-2), {"momentum_buffer"}),
    "Lion": (Lion, {"exp_avg"}),
    "Adam of 8 bits": (Adam8Bit, set()),
    "Adam of bfloat16": (MasterAdam, ADAM),
}


def fresh(name):
    """Return a new model and its optimizer."""
    torch.manual_seed(3)
    model = model_of().to(torch.bfloat16 if name == "Adam of bfloat16" else torch.float32)
    if name == "Muon" and not hasattr(optim, "Muon"):
        pytest.skip("this torch has no Muon")
    parameters = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]  # Muon takes only matrices
    return model, OPTIMIZERS[name][0](parameters)


def trained(model, optimizer, steps):
    """Train on tokens drawn from the global generator. Returns the losses."""
    losses = []
    model.train()
    for _ in range(steps):
        tokens = torch.randint(0, 40, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        try:
            optimizer.step()
        except (AssertionError, RuntimeError) as error:
            if "apturable" in str(error):
                pytest.skip(f"refused on the CPU: {error}")
            raise
        losses.append(loss.item())
    return losses


def after_steps(name, steps=STEPS):
    model, optimizer = fresh(name)
    trained(model, optimizer, steps)
    return model, optimizer


def state_of(model, optimizer):
    """Return the tensors and labels of a whole state, as a Checkpointer collects them."""
    objects = {"model": model, "optimizer": optimizer}
    tensors = flatten(collect(objects))[1]
    return tensors, labels(tensors, objects, vectors=True)


def norm(values):
    return float(np.linalg.norm(values))


def numbers(tensor):
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("quality", ["high", "balanced", "small"])
def test_only_moments_are_quantized_and_within_the_tolerances_of_the_preset(name, quality):
    preset = PRESETS[quality]
    tensors, label_of = state_of(*after_steps(name))
    quantized = quantize_moments(tensors, label_of, preset.first_tolerance, preset.second_tolerance)
    exact_instead = {"exp_avg"} if name in UNKNOWN_UPDATE and quality == "high" else set()
    assert {full.rpartition(".")[2] for full in quantized} == OPTIMIZERS[name][1] - exact_instead
    for full, stored in quantized.items():
        exact, restored = tensors[full], dequantize(stored)
        assert (restored.dtype, restored.shape) == (exact.dtype, exact.shape)
        assert bool(restored.isfinite().all())
        if label_of[full].role == "second_moment":
            moved = numbers(exact) > 0
            ratio = np.sqrt(numbers(exact)[moved] / numbers(restored)[moved])
            assert norm(ratio - 1) <= preset.second_tolerance * 1.001 * math.sqrt(ratio.size)
        elif isinstance(stored, ScaledMoment):
            change = first_effect(exact, restored, dequantize(stored.second))
            assert change <= preset.first_tolerance * 1.001
        else:
            assert norm(numbers(restored) - numbers(exact)) <= preset.first_tolerance * 1.001 * norm(numbers(exact))


@pytest.mark.parametrize("name", [name for name, (_, keys) in OPTIMIZERS.items() if "exp_avg_sq" in keys])
def test_first_moments_are_stored_relative_to_the_second_moments_that_divide_their_update(name):
    tensors, label_of = state_of(*after_steps(name))
    quantized = quantize_moments(tensors, label_of, 0.5, 0.5)
    units = {full: stored for full, stored in quantized.items() if isinstance(stored, ScaledMoment)}
    assert len(units) == 7  # one for every parameter
    for full, stored in units.items():
        divides = "max_exp_avg_sq" if "amsgrad" in name else "exp_avg_sq"
        assert stored.second_name == f"{full.rpartition('.')[0]}.{divides}"
        assert stored.second is quantized[stored.second_name]


def next_update(parameter, optimizer, gradient):
    """Return what one step of the optimizer adds to its only parameter."""
    before = parameter.detach().clone()
    parameter.grad = gradient.clone()
    optimizer.step()
    return parameter.detach() - before


NOT_JUDGED = {"Muon", "Adam capturable"}
"""Muon's buffer is treated like SGD's, as the guide says. The capturable Adam does not step on a CPU."""


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in NOT_JUDGED])
@pytest.mark.parametrize("gradient_size", [0.0, 1.0])
def test_the_next_update_is_within_the_tolerance_even_if_gradients_differ_in_size(name, gradient_size):
    torch.manual_seed(5)
    sizes, mean = torch.randn(48, 64).mul(2).exp(), torch.randn(48, 64) * 0.3
    model = nn.ParameterList([torch.randn(48, 64) * 0.1])
    optimizer = OPTIMIZERS[name][0](model.parameters())
    for _ in range(40):
        next_update(model[0], optimizer, (torch.randn(48, 64) + mean) * sizes)
    tensors, label_of = state_of(model, optimizer)
    first_tolerance, second_tolerance = PRESETS["high"].first_tolerance, PRESETS["high"].second_tolerance
    quantized = quantize_moments(tensors, label_of, first_tolerance, second_tolerance)
    state = copy.deepcopy(optimizer.state_dict())
    for full, stored in quantized.items():
        state["state"][0][full.rpartition(".")[2]] = dequantize(stored)
    other = copy.deepcopy(model)
    other_optimizer = OPTIMIZERS[name][0](other.parameters())
    other_optimizer.load_state_dict(state)
    gradient = torch.randn(48, 64) * sizes * gradient_size
    wanted, found = (next_update(*both, gradient) for both in ((model[0], optimizer), (other[0], other_optimizer)))
    firsts = any(label_of[full].role == "first_moment" for full in quantized)
    # The tolerances are for each moment, and those of first moments count updates by the root of their second moment.
    both = math.hypot(first_tolerance, second_tolerance)
    limit = 1.15 * both if firsts else second_tolerance
    assert float((found - wanted).double().norm()) <= limit * float(wanted.double().norm())


def test_matrices_of_second_moments_are_stored_as_rank_one_products_if_precise_enough():
    tensors, label_of = state_of(*after_steps("AdamW"))
    quantized = quantize_moments(tensors, label_of, 1.0, 0.9)
    kinds = {full: isinstance(stored, RankOne) for full, stored in quantized.items() if full.endswith("_sq")}
    assert any(kinds.values())
    assert not any(product for full, product in kinds.items() if tensors[full].ndim < 2)


def saved(name, folder, quality):
    """Train and save. Returns the model and optimizer, which can continue to train."""
    model, optimizer = after_steps(name)
    with Checkpointer(folder, model, optimizer, quality=quality) as checkpointer:
        checkpointer.save(STEPS)
    return model, optimizer


def restored(folder, name, quality):
    """Restore the checkpoint into other objects that have trained differently."""
    torch.manual_seed(99)
    model, optimizer = after_steps(name, 1)
    torch.manual_seed(98)
    with Checkpointer(folder, model, optimizer, quality=quality) as checkpointer:
        assert checkpointer.restore() == STEPS
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("quality", ["high", "balanced", "small"])
def test_training_continues_after_a_restore(name, quality, tmp_path):
    uninterrupted = trained(*saved(name, tmp_path, quality), 5)
    losses = trained(*restored(tmp_path, name, quality), 5)
    assert all(math.isfinite(loss) for loss in losses)
    assert max(losses) < max(uninterrupted) + 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_after_a_lossless_restore_equals_training_without_an_interruption(name, tmp_path):
    model, optimizer = saved(name, tmp_path, "lossless")
    uninterrupted = trained(model, optimizer, 5)
    other, other_optimizer = restored(tmp_path, name, "lossless")
    assert trained(other, other_optimizer, 5) == uninterrupted
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(other_optimizer.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_checkpoint_after_a_restore_can_be_restored(name, quality, tmp_path):
    saved(name, tmp_path, quality)
    torch.manual_seed(99)
    model, optimizer = after_steps(name, 1)
    with Checkpointer(tmp_path, model, optimizer, quality=quality) as checkpointer:
        checkpointer.restore()
        trained(model, optimizer, 3)
        assert checkpointer.save(STEPS + 3).result().parent == STEPS
    other, other_optimizer = after_steps(name, 1)
    with Checkpointer(tmp_path, other, other_optimizer, quality=quality) as checkpointer:
        assert (checkpointer.restore(), checkpointer.skipped) == (STEPS + 3, [])
    if quality == "lossless":
        assert bits(other.state_dict()) == bits(model.state_dict())
        assert bits(other_optimizer.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "Adam amsgrad", "SGD momentum", "RMSprop centered", "Lion"])
def test_repeated_saves_each_restore_their_own_state(name, tmp_path):
    model, optimizer = fresh(name)
    with Checkpointer(tmp_path, model, optimizer, quality="high") as checkpointer:
        records = [checkpointer.save(step).result() for step in range(1, 5) if trained(model, optimizer, 3)]
    assert [record.parent for record in records] == [None, 1, 2, 3]
    for step in (1, 2, 3, 4):
        stored = load(tmp_path, step)["optimizer"]["state"]
        other, other_optimizer = fresh(name)
        with Checkpointer(tmp_path, other, other_optimizer, quality="high") as checkpointer:
            checkpointer.restore(step)
        assert bits(named_state(other_optimizer, model=other)["state"]) == bits(stored)
