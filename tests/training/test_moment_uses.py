"""Whose moments may be quantized: known classes, and those whose steps use their moments as Adam does."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import bits, named_state

import dynaquant as dq
from dynaquant.store.run import Run
from dynaquant.training import rng
from dynaquant.training.moment_uses import why_exact


class Adamlike(torch.optim.Optimizer):
    """Adam without a correction of its bias, whose parts a subclass may change."""

    def __init__(self, parameters, lr=1e-2, betas=(0.9, 0.99), **others):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8, **others})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                self.update(p, p.grad, state["exp_avg"], state["exp_avg_sq"], group)

    def update(self, p, gradient, first, second, group):
        first.lerp_(gradient, 1 - group["betas"][0])
        second.lerp_(gradient.square(), 1 - group["betas"][1])
        p.sub_(first / (second.sqrt() + group["eps"]), alpha=group["lr"])


class Rotated(Adamlike):
    """Keeps both moments of a matrix in another basis, as SOAP does."""

    def update(self, p, gradient, first, second, group):
        angle = torch.linalg.qr(torch.arange(p.shape[0] ** 2.0).reshape(p.shape[0], -1).sin())[0]
        turned = angle.T @ gradient
        first.lerp_(turned, 1 - group["betas"][0])
        second.lerp_(turned.square(), 1 - group["betas"][1])
        p.sub_(angle @ (first / (second.sqrt() + group["eps"])), alpha=group["lr"])


class Signs(Adamlike):
    """Takes the sign of the first moment."""

    def update(self, p, gradient, first, second, group):
        first.lerp_(gradient, 1 - group["betas"][0])
        second.lerp_(gradient.square(), 1 - group["betas"][1])
        p.sub_(first.sign(), alpha=group["lr"])


class Normalized(Adamlike):
    """Averages gradients that the second moment has divided, as ADOPT does."""

    def update(self, p, gradient, first, second, group):
        second.lerp_(gradient.square(), 1 - group["betas"][1])
        first.lerp_(gradient / (second.sqrt() + group["eps"]), 1 - group["betas"][0])
        p.sub_(first, alpha=group["lr"])


class Variance(Adamlike):
    """Averages squares of what the first moment does not expect, as AdaBelief does."""

    def update(self, p, gradient, first, second, group):
        first.lerp_(gradient, 1 - group["betas"][0])
        second.lerp_((gradient - first).square(), 1 - group["betas"][1])
        p.sub_(first / (second.sqrt() + group["eps"]), alpha=group["lr"])


class Slow(Adamlike):
    """Has one more average in its state."""

    def update(self, p, gradient, first, second, group):
        super().update(p, gradient, first, second, group)
        p.sub_(self.state[p].setdefault("slow", torch.zeros_like(p)).lerp_(gradient, 1e-6), alpha=group["lr"])


class Trusting(Adamlike):
    """Gives each update of a tensor a length of its own and decays weights, as LAMB does."""

    def update(self, p, gradient, first, second, group):
        before = p.clone()
        super().update(p, gradient, first, second, group)
        p.copy_(before + (p - before) * before.norm() / (p - before).norm() * group["lr"] - 1e-4 * before)


class WithMasters(Adamlike):
    """Keeps master weights in its state."""

    def update(self, p, gradient, first, second, group):
        master = self.state[p].setdefault("master", p.float().clone())
        super().update(master, gradient.float(), first, second, group)
        p.copy_(master)


class Inherits(torch.optim.AdamW):
    pass


class CallsAdam(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


class ChangesAdam(torch.optim.Adam):
    def step(self, closure=None):
        with torch.no_grad():
            for state in self.state.values():
                state["exp_avg"].sign_()
        return super().step(closure)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(kind, steps=12, matrices=False, **options):
    model = model_of()
    parameters = [p for p in model.parameters() if p.ndim == 2] if matrices else model.parameters()
    optimizer = kind(parameters, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 12, generator=generator)
        nn.functional.cross_entropy(model(inputs), inputs.argmax(1) % 4).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
        *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, Inherits),
    ],
)
def test_optimizers_of_torch_are_known_and_so_is_a_subclass_that_inherits_the_step(kind):
    assert why_exact(kind(model_of().parameters())) is None


@pytest.mark.parametrize("kind", [Adamlike, Trusting, WithMasters, CallsAdam])
@pytest.mark.parametrize("options", [{}, {"lr": 0.0}, {"betas": (0.5, 0.999)}])
def test_an_unknown_class_that_updates_as_adam_does_may_be_quantized(kind, options):
    assert why_exact(trained(kind, **options)[1]) is None


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"weight_decay": 0.3}, {"maximize": True, "foreach": True}])
def test_the_variants_of_adam_show_that_they_are_like_adam(options):
    assert why_exact(trained(CallsAdam, **options)[1]) is None


@pytest.mark.parametrize("kind", [Rotated, Signs, Normalized, Variance, Slow, ChangesAdam])
def test_a_class_that_uses_its_moments_otherwise_stays_exact(kind):
    assert why_exact(trained(kind, matrices=True)[1])


def test_each_parameter_group_must_be_like_adam():
    class Either(Adamlike):
        def update(self, p, gradient, first, second, group):
            (Signs if group["signs"] else Adamlike).update(self, p, gradient, first, second, group)

    model = model_of()
    groups = [{"params": [p], "signs": p.ndim == 1} for p in model.parameters()]
    assert why_exact(Either(groups[::2], signs=False)) is None
    assert why_exact(Either(groups, signs=False))


def test_the_present_learning_rate_and_step_do_not_change_the_answer():
    _, optimizer = trained(Trusting)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    optimizer.param_groups[0]["steps_so_far"] = 12
    assert why_exact(optimizer) is None


def test_the_check_leaves_training_and_random_numbers_alone():
    class Draws(Adamlike):
        def step(self, closure=None):  # noqa: ARG002
            torch.rand(3), np.random.rand(), random.random()
            super().step()

    model, optimizer = trained(Draws)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step = lambda *_: calls.append("step")  # as a scheduler puts something around it
    before, generators = copy.deepcopy(named_state(optimizer, model=model)), rng.get_state()
    gradients = [p.grad.clone() for p in model.parameters()]
    assert why_exact(optimizer) is None
    assert rng.same(generators, rng.get_state())
    assert bits(named_state(optimizer, model=model)) == bits(before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert calls == []


def test_the_constructor_is_not_called_and_objects_of_the_optimizer_are_not_touched():
    class Logs(Adamlike):
        made = 0

        def __init__(self, parameters, log):
            super().__init__(parameters)
            Logs.made += 1
            self.log = log

        def step(self, closure=None):  # noqa: ARG002
            self.log.append("step")
            super().step()

    class Log(list):
        pass

    log = Log()
    optimizer = trained(lambda parameters: Logs(parameters, log), steps=2)[1]
    reason = why_exact(optimizer)
    assert "cannot be tried" in reason
    assert "log" in reason
    assert (Logs.made, log) == (1, ["step", "step"])


def test_a_step_that_fails_on_a_small_parameter_is_a_reason():
    class Picky(Adamlike):
        def update(self, p, *rest):
            if p.numel() < 50:
                raise ValueError("too small")
            super().update(p, *rest)

    assert "ValueError: too small" in why_exact(Picky(model_of().parameters()))


def test_a_step_with_hooks_of_all_optimizers_is_not_tried():
    calls = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        assert "hooks" in why_exact(Adamlike(model_of().parameters()))
    finally:
        hook.remove()
    assert calls == []


def saved(kind, folder, **options):
    model, optimizer = trained(kind, matrices=True)
    with dq.Checkpointer(folder, model, optimizer, every=5, **options) as checkpointer:
        record = checkpointer.save(12).result()
    roles = {e.label.role for e in Run(folder).file(12).header.entries if e.name.startswith("optimizer.")}
    return model, optimizer, record, roles


@pytest.mark.parametrize("kind", [Rotated, Signs, Normalized, Variance, Slow])
@pytest.mark.parametrize("quality", ["small", "balanced", "high"])
def test_moments_of_an_unknown_class_come_back_exactly_and_the_record_says_why(kind, quality, tmp_path):
    _, optimizer, record, roles = saved(kind, tmp_path, quality=quality)
    assert roles == {"exact"}
    (note,) = [note for note in record.notes if "moments" in note]
    assert "the moments of optimizer are stored exactly" in note
    assert kind.__qualname__ in note
    assert "roles={'optimizer.*.exp_avg': 'first_moment'}" in note
    other_model, other = trained(kind, steps=0, matrices=True)
    with dq.Checkpointer(tmp_path, other_model, other) as checkpointer:
        assert checkpointer.restore() == 12
    assert bits(other.state_dict()) == bits(optimizer.state_dict())


def test_moments_of_a_class_like_adam_are_quantized_without_a_note(tmp_path):
    _, _, record, roles = saved(Trusting, tmp_path)
    assert roles == {"first_moment", "second_moment"}
    assert not [note for note in record.notes if "moments" in note]


def test_the_user_may_have_the_moments_of_an_unknown_class_quantized(tmp_path):
    roles = {"optimizer.*.exp_avg": "first_moment", "optimizer.*.exp_avg_sq": "second_moment"}
    _, _, record, found = saved(Signs, tmp_path, roles=roles)
    assert found == {"first_moment", "second_moment"}
    assert not [note for note in record.notes if "moments" in note]


def test_a_lossless_checkpoint_needs_no_note(tmp_path):
    assert not saved(Signs, tmp_path, quality="lossless")[2].notes


def test_complex_weights_are_stored_exactly_and_the_record_says_so(tmp_path):
    for dtype, expected in ((torch.complex64, 1), (torch.float32, 0)):
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(64, 64, dtype=dtype))})
        optimizer = torch.optim.AdamW(model.parameters())
        model["w"].abs().square().sum().backward()
        optimizer.step()
        with dq.Checkpointer(tmp_path / str(dtype), model, optimizer) as ckpt:
            notes = ckpt.save(1).result().notes
        assert (
            sum("complex weights and their moments are stored exactly, such as model.w" in n for n in notes) == expected
        )


class Lookahead(torch.optim.Optimizer):
    """Wraps AdamW as Lookahead does: moments lie in the state of the inner optimizer."""

    def __init__(self, parameters):
        self.base_optimizer = torch.optim.AdamW(parameters)
        super().__init__(self.base_optimizer.param_groups, {})

    def step(self, closure=None):
        self.base_optimizer.step(closure)

    def state_dict(self):
        return {"base_optimizer": self.base_optimizer.state_dict()}

    def load_state_dict(self, state):
        self.base_optimizer.load_state_dict(state["base_optimizer"])


def test_a_note_says_which_copies_of_weights_are_stored_exactly(tmp_path):
    model = torch.nn.Linear(64, 64, bias=False)
    target = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    optimizer = Lookahead(model.parameters())
    extras = {"target": target, "frozen": torch.nn.Linear(64, 64, bias=False).requires_grad_(False)}
    for name, roles in (("alone", {}), ("decided", {"target.*": "average"})):
        with dq.Checkpointer(tmp_path / name, model, optimizer, extras=extras, roles=roles) as ckpt:
            for step in (1, 2):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    target.weight.lerp_(model.weight, 0.1)
                ckpt.save(step)
            notes = [note for note in ckpt.records()[-1].notes if "with shapes of weights" in note]
        assert any(note.startswith("optimizer.base_optimizer.state.0.exp_avg and 1 more") for note in notes)
        assert any("roles={'target.*': 'average'}" in note for note in notes) == (not roles)
        assert len(notes) == 2 - len(roles)  # what does not train takes no space


def test_a_training_with_sparse_gradients_keeps_its_moments(tmp_path):
    """A row is seen seldom, so it would take long to gather a first moment again."""

    def training():
        torch.manual_seed(0)
        table = nn.Embedding(500, 16, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters(), lr=0.05)

    def loss_after(table, optimizer, steps):
        wanted = torch.linspace(-1, 1, 500)[:, None]
        for step in steps:
            rows = torch.randint(500, (32,), generator=torch.Generator().manual_seed(step))
            (table(rows) - wanted[rows]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (table.weight - wanted).square().mean().item()

    table, optimizer = training()
    loss_after(table, optimizer, range(60))
    with dq.Checkpointer(tmp_path, table, optimizer) as ckpt:
        record = ckpt.save(60).result()
    assert "first_moment" not in record.roles
    undisturbed = loss_after(table, optimizer, range(60, 120))
    with dq.Checkpointer(tmp_path, *(resumed := training())) as ckpt:
        assert ckpt.restore() == 60
    assert loss_after(*resumed, range(60, 120)) < 1.05 * undisturbed
