"""After a restore without first moments, optimizers correct their bias: against the formula in float64 (method 3.2)."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from dynaquant.training import first_moments
from dynaquant.training.first_moments import rule_of
from dynaquant.training.moment_correction import MomentCorrections

optim = torch.optim
DONE = 25
"""Steps before the restore."""
BETA = 0.9
WINDOW = 44
"""Steps after which the factor of β = 0.9 is at most 1.01."""

OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, 1e-3),
    "Adam with decay": lambda p: optim.Adam(p, 1e-3, weight_decay=0.3),
    "Adam maximizing with decay": lambda p: optim.Adam(p, 1e-3, weight_decay=0.3, maximize=True),
    "Adam with decoupled decay": lambda p: optim.AdamW(p, 1e-3, weight_decay=0.3),
    "Adam foreach": lambda p: optim.Adam(p, 1e-3, weight_decay=0.3, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, 1e-3, weight_decay=0.3, fused=True),
    "Adam amsgrad": lambda p: optim.Adam(p, 1e-3, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, 1e-3, weight_decay=0.3, fused=True, maximize=True),
    "NAdam": lambda p: optim.NAdam(p, 1e-3, weight_decay=0.3),
    "NAdam decoupled": lambda p: optim.NAdam(p, 1e-3, weight_decay=0.3, decoupled_weight_decay=True),
    "RAdam": lambda p: optim.RAdam(p, 1e-3, weight_decay=0.3),
    "RAdam decoupled": lambda p: optim.RAdam(p, 1e-3, weight_decay=0.3, decoupled_weight_decay=True),
    "Adamax": lambda p: optim.Adamax(p, 1e-3, betas=(0.9, 0.99), weight_decay=0.3, maximize=True),
    "SGD": lambda p: optim.SGD(p, 1e-2, momentum=0.9),
    "SGD dampening": lambda p: optim.SGD(p, 1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD nesterov": lambda p: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "SGD fused": lambda p: optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1, fused=True),
    "Muon": lambda p: optim.Muon(p, 1e-3, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _momentum_buffers_too(monkeypatch):
    """The mechanism is the same for all moments, although momentum buffers are not corrected by default."""
    monkeypatch.setattr(first_moments, "LARGEST_FACTOR", {"exp_avg": 3.0, "momentum_buffer": 3.0})


def parameters_of(count=2, shape=(3, 4)):
    return [nn.Parameter(torch.randn(shape)) for _ in range(count)]


def gradients_for(parameters):
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) + 0.3


def trained(name, steps=DONE):
    """Return the parameters and their optimizer after some steps."""
    if name == "Muon" and not hasattr(optim, "Muon"):
        pytest.skip("this torch has no Muon")
    parameters = parameters_of()
    optimizer = OPTIMIZERS[name](parameters)
    for _ in range(steps):
        gradients_for(parameters)
        optimizer.step()
    return parameters, optimizer


def begun(optimizer, parameters, corrections=None):
    """Set the first moments to zero, as a restore does, and begin to correct them."""
    for parameter in parameters:
        optimizer.state[parameter][rule_of(optimizer).key].zero_()
    corrections = corrections or MomentCorrections()
    corrections.begin("optimizer", optimizer, set(parameters))
    return corrections


class Reference:
    """The corrected moment of one parameter by the formula, in float64.

    done: optimizer steps before the restore, None if the optimizer counts none. gain: the weight of a new gradient.
    largest: the limit of the factor. From a factor of 1.01 on, the optimizer goes on alone.
    """

    def __init__(self, done=DONE, gain=1 - BETA, largest=3.0):
        self.done, self.gain, self.largest = done, gain, largest
        self.gradients, self.ended = [], False

    def after(self, gradient):
        """Add the gradient of a step and return the moment after it, and its factor."""
        self.gradients.append(gradient.double())
        k = len(self.gradients)
        whole = 1.0 if self.done is None else 1 - BETA ** (self.done + k)
        factor = min(whole / (1 - BETA**k), self.largest)
        total = sum(self.gain * BETA ** (k - i) * g for i, g in enumerate(self.gradients, 1))
        if self.ended:
            self.moment = BETA * self.moment + self.gain * self.gradients[-1]
        else:
            self.moment, self.ended = factor * total, factor <= 1.01
        return self.moment, factor


def effective_gradient(parameter, optimizer):
    """Return what the moment accumulates, by the documentation of torch.optim."""
    group = optimizer.param_groups[0]
    gradient = -parameter.grad if group.get("maximize") else parameter.grad
    decoupled = group.get("decoupled_weight_decay") or type(optimizer).__name__ in ("AdamW", "Muon")
    return gradient + group["weight_decay"] * parameter if not decoupled else gradient


def moments_and_references(optimizer, parameters, references, steps):
    """Train and yield for every step and parameter the moment, the moment by the formula, and its factor."""
    key = rule_of(optimizer).key
    for _ in range(steps):
        gradients_for(parameters)
        wanted = [
            r.after(effective_gradient(p, optimizer).detach()) for p, r in zip(parameters, references, strict=True)
        ]
        optimizer.step()
        for parameter, (moment, factor) in zip(parameters, wanted, strict=True):
            yield optimizer.state[parameter][key], moment, factor


def assert_close(moment, wanted):
    torch.testing.assert_close(moment.double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("done", [3, DONE])
def test_the_moment_after_every_step_is_that_of_the_formula(name, done):
    parameters, optimizer = trained(name, done)
    corrections = begun(optimizer, parameters)
    assert corrections.count == 2
    counted = "step" in optimizer.state[parameters[0]]
    gain = 1 - optimizer.param_groups[0].get("dampening", BETA)
    references = [Reference(done if counted else None, gain) for _ in parameters]
    factors = []
    for moment, wanted, factor in moments_and_references(optimizer, parameters, references, WINDOW):
        assert_close(moment, wanted)
        factors.append(factor)
    assert factors[0] == 3
    assert factors[-1] <= 1.01
    assert not corrections.active


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_of_a_step_uses_the_corrected_moment(name):
    """A step after the correction equals the step of an optimizer whose moment was set by the formula."""
    parameters, optimizer = trained(name)
    begun(optimizer, parameters)
    gradients_for(parameters)
    optimizer.step()
    other, other_optimizer = copy.deepcopy((parameters, optimizer))
    gradients_for(parameters)
    key, group = rule_of(optimizer).key, optimizer.param_groups[0]
    counted = "step" in optimizer.state[parameters[0]]
    gain = 1 - group.get("dampening", BETA)
    whole = [1 - BETA ** (DONE + k) if counted else 1.0 for k in (1, 2)]
    factors = [min(whole[k - 1] / (1 - BETA**k), 3.0) for k in (1, 2)]
    for mine, its in zip(parameters, other, strict=True):
        its.grad = mine.grad.clone()
        gradient = effective_gradient(its, other_optimizer).detach()
        moment = other_optimizer.state[its][key]
        moment.copy_(factors[1] / factors[0] * moment + (factors[1] - 1) * gain / BETA * gradient)
    optimizer.step()
    other_optimizer.step()
    for mine, its in zip(parameters, other, strict=True):
        torch.testing.assert_close(mine, its)


def assert_next_steps_are_equal(parameters, optimizer, other, other_optimizer):
    gradients_for(parameters)
    for mine, its in zip(parameters, other, strict=True):
        its.grad = mine.grad.clone()
    optimizer.step()
    other_optimizer.step()
    assert all(torch.equal(mine, its) for mine, its in zip(parameters, other, strict=True))


def test_after_the_window_the_optimizer_goes_on_alone():
    parameters, optimizer = trained("Adam")
    corrections = begun(optimizer, parameters)
    for _ in range(WINDOW):
        gradients_for(parameters)
        optimizer.step()
    other, other_optimizer = copy.deepcopy((parameters, optimizer))
    assert not other_optimizer._optimizer_step_pre_hooks
    for _ in range(3):
        assert_next_steps_are_equal(parameters, optimizer, other, other_optimizer)
    corrections.saved()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    assert corrections.count == 2


def test_other_hooks_of_the_optimizer_run_in_every_step():
    parameters, optimizer = trained("Adam")
    calls = []
    begun(optimizer, parameters)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for _ in range(WINDOW + 2):
        gradients_for(parameters)
        optimizer.step()
    assert calls == ["pre", "post"] * (WINDOW + 2)


def test_a_corrected_moment_has_the_mean_of_one_that_was_never_lost():
    parameters, optimizer = trained("Adam", 200)
    begun(optimizer, parameters)
    for step in range(1, WINDOW + 20):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
        moment = optimizer.state[parameters[0]]["exp_avg"]
        length = min(1.0, 3 * (1 - BETA**step))
        torch.testing.assert_close(moment, torch.full_like(moment, 2.0 * length))


def test_every_parameter_counts_its_own_steps():
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    references = [Reference(), Reference()]
    for step in range(30):
        gradients_for(parameters)
        absent = step % 3 == 0
        if absent:
            parameters[1].grad = None
        wanted = [r.after(p.grad) for p, r in zip(parameters, references, strict=True) if p.grad is not None]
        optimizer.step()
        for parameter, (moment, _) in zip(parameters, wanted, strict=not absent):
            assert_close(optimizer.state[parameter]["exp_avg"], moment)
    assert len(references[1].gradients) == 20


def test_groups_have_their_own_betas_and_a_scheduler_may_change_them():
    parameters = parameters_of()
    optimizer = optim.Adam(
        [{"params": parameters[:1], "betas": (0.8, 0.99)}, {"params": parameters[1:], "betas": (0.95, 0.99)}]
    )
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 60, base_momentum=0.8, max_momentum=0.95)

    def step():
        gradients_for(parameters)
        betas = [group["betas"][0] for group in optimizer.param_groups]
        gradients = [p.grad.double() for p in parameters]
        optimizer.step()
        schedule.step()
        return betas, gradients

    for _ in range(10):
        step()
    wholes = [1 - group["betas"][0] ** 10 for group in optimizer.param_groups]
    begun(optimizer, parameters)
    sums, kept = [torch.zeros(3, 4).double() for _ in parameters], [0.0, 0.0]
    betas_seen = set()
    for _ in range(12):
        betas, gradients = step()
        betas_seen.add(betas[0])
        for i, (beta, gradient) in enumerate(zip(betas, gradients, strict=True)):
            sums[i] = beta * sums[i] + (1 - beta) * gradient
            kept[i], wholes[i] = (beta * each + 1 - beta for each in (kept[i], wholes[i]))
            factor = min(wholes[i] / kept[i], 3.0)
            assert_close(optimizer.state[parameters[i]]["exp_avg"], factor * sums[i])
    assert len(betas_seen) == 12


@pytest.mark.parametrize("as_keyword", [False, True])
def test_with_a_closure_the_gradients_that_it_computes_count(as_keyword):
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    references = [Reference(), Reference()]
    for _ in range(5):
        gradients_for(parameters)  # stale: the closure replaces them
        wanted = []

        def closure():
            optimizer.zero_grad()
            loss = sum((p * torch.randn_like(p)).sum() for p in parameters)
            loss.backward()
            wanted[:] = [r.after(p.grad)[0] for p, r in zip(parameters, references, strict=True)]  # noqa: B023
            return loss

        loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
        assert loss is not None
        for parameter, moment in zip(parameters, wanted, strict=True):
            assert_close(optimizer.state[parameter]["exp_avg"], moment)


@pytest.mark.parametrize("name", ["Adam", "Adam fused"])
def test_steps_that_a_grad_scaler_skips_do_not_count(name):
    parameters, optimizer = trained(name)
    begun(optimizer, parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    references = [Reference(), Reference()]
    for step in range(12):
        before = [optimizer.state[p]["exp_avg"].clone() for p in parameters]
        optimizer.zero_grad()
        directions = [torch.randn_like(p) + 0.3 for p in parameters]
        scaler.scale(sum((p * d).sum() for p, d in zip(parameters, directions, strict=True))).backward()
        overflow = step % 4 == 1
        if overflow:
            parameters[0].grad[0, 0] = math.inf
            wanted = before
        else:
            decay = optimizer.param_groups[0]["weight_decay"]
            gradients = [d + decay * p.detach() for p, d in zip(parameters, directions, strict=True)]
            wanted = [r.after(gradient)[0] for r, gradient in zip(references, gradients, strict=True)]
        scaler.step(optimizer)
        scaler.update()
        for parameter, moment in zip(parameters, wanted, strict=True):
            assert_close(optimizer.state[parameter]["exp_avg"], moment.double())
    assert len(references[0].gradients) == 9


def test_parameters_may_come_and_go():
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    new = parameters_of(1)
    optimizer.add_param_group({"params": new})
    del optimizer.param_groups[0]["params"][1]
    optimizer.state.pop(parameters[1])
    reference, alone = Reference(), Reference(0)
    for _ in range(5):
        gradients_for([*parameters, *new])
        moment, _ = reference.after(parameters[0].grad)
        plain, factor = alone.after(new[0].grad)
        optimizer.step()
        assert_close(optimizer.state[parameters[0]]["exp_avg"], moment)
        assert_close(optimizer.state[new[0]]["exp_avg"], plain / factor)


def test_a_state_that_the_user_loads_is_not_corrected():
    parameters, optimizer = trained("Adam")
    state = copy.deepcopy(optimizer.state_dict())
    corrections = begun(optimizer, parameters)
    optimizer.load_state_dict(state)
    other, other_optimizer = copy.deepcopy((parameters, optimizer))
    assert_next_steps_are_equal(parameters, optimizer, other, other_optimizer)
    corrections.saved()
    assert not optimizer._optimizer_step_pre_hooks


def test_moments_that_move_are_still_corrected():
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()  # as .to(device) does
    references = [Reference(), Reference()]
    for moment, wanted, _ in moments_and_references(optimizer, parameters, references, 5):
        assert_close(moment, wanted)


def test_an_optimizer_can_be_copied_and_pickled_meanwhile():
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        its = other.param_groups[0]["params"]
        gradients_for(its)
        other.step()
        torch.testing.assert_close(other.state[its[0]]["exp_avg"], 0.1 * its[0].grad)


def test_a_second_restore_begins_anew():
    parameters, optimizer = trained("Adam")
    corrections = begun(optimizer, parameters)
    for _ in range(5):
        gradients_for(parameters)
        optimizer.step()
    begun(optimizer, parameters, corrections)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    references = [Reference(DONE + 5), Reference(DONE + 5)]
    for moment, wanted, _ in moments_and_references(optimizer, parameters, references, 5):
        assert_close(moment, wanted)


def test_a_gradient_that_is_not_a_number_makes_the_moment_the_same_as_without_a_correction():
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    gradients_for(parameters)
    parameters[0].grad[0, 0] = math.nan
    optimizer.step()
    moment = optimizer.state[parameters[0]]["exp_avg"]
    assert int(moment.isnan().sum()) == 1
    assert bool(optimizer.state[parameters[1]]["exp_avg"].isfinite().all())


def test_the_moments_of_half_precision_parameters_are_corrected_as_precisely_as_they_are_stored():
    parameters = [nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = optim.AdamW(parameters, 1e-3)
    for _ in range(DONE):
        gradients_for(parameters)
        optimizer.step()
    begun(optimizer, parameters)
    references = [Reference(), Reference()]
    for moment, wanted, _ in moments_and_references(optimizer, parameters, references, 10):
        torch.testing.assert_close(moment.double(), wanted, rtol=0.02, atol=0.02)


def test_a_differentiable_optimizer_is_left_alone():
    parameters = parameters_of()
    optimizer = optim.Adam(parameters, differentiable=True)
    corrections = MomentCorrections()
    corrections.begin("optimizer", optimizer, set(parameters))
    assert (corrections.count, len(corrections.notes)) == (0, 1)


def test_complex_parameters_are_corrected():
    parameters = [nn.Parameter(torch.randn(4, dtype=torch.complex64))]
    optimizer = optim.Adam(parameters, 1e-3)
    for _ in range(DONE):
        gradients_for(parameters)
        optimizer.step()
    begun(optimizer, parameters)
    gradients_for(parameters)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[parameters[0]]["exp_avg"], 0.3 * parameters[0].grad)


def test_an_unknown_optimizer_is_left_alone_and_a_note_says_so():
    class Mine(optim.Adam):
        pass

    parameters = parameters_of()
    optimizer = Mine(parameters)
    corrections = MomentCorrections()
    corrections.begin("optimizer", optimizer, set(parameters))
    assert corrections.count == 0
    assert not optimizer._optimizer_step_pre_hooks
    (note,) = corrections.notes
    assert "Mine; roles={'optimizer.*.exp_avg': 'exact'} keeps them" in note
    corrections.saved()
    assert corrections.notes == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch itself
def test_compiled_steps_are_corrected_without_compiling_for_each_factor():
    parameters, optimizer = trained("Adam")
    begun(optimizer, parameters)
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    optimizer.step = torch.compile(optimizer.step, backend=backend)
    references = [Reference(), Reference()]
    for moment, wanted, _ in moments_and_references(optimizer, parameters, references, 20):
        assert_close(moment, wanted)
    assert 0 < len(compiled) < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
def test_moments_on_a_cuda_device_are_corrected(options):
    parameters = [nn.Parameter(torch.randn(3, 4, device="cuda")) for _ in range(2)]
    optimizer = optim.Adam(parameters, 1e-3, weight_decay=0.3, **options)
    for _ in range(DONE):
        gradients_for(parameters)
        optimizer.step()
    begun(optimizer, parameters)
    references = [Reference(), Reference()]
    for moment, wanted, _ in moments_and_references(optimizer, parameters, references, 10):
        assert_close(moment, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_is_captured_in_a_graph_is_not_corrected_and_a_note_says_so():
    parameters = [nn.Parameter(torch.randn(3, 4, device="cuda"))]
    optimizer = optim.Adam(parameters, 1e-3, capturable=True)
    gradients_for(parameters)
    optimizer.step()
    corrections = begun(optimizer, parameters)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert corrections.count == 0
    (note,) = corrections.notes
    assert note.endswith("as a CUDA graph captured its step")
