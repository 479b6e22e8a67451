"""First moments after a restore: corrected if the checkpoint does not hold them, left alone if it does."""

import logging

import pytest
import torch
from training import bits, model_of, named_state, train

import dynaquant as dq

BETA = 0.9


def trained(optimizer_class=torch.optim.AdamW, seed=3, steps=12):
    torch.manual_seed(seed)
    model = model_of()
    optimizer = optimizer_class(model.parameters(), 1e-3)
    train(model, optimizer, steps)
    return model, optimizer


def other(optimizer_class=torch.optim.AdamW):
    """Return objects that have trained differently."""
    return trained(optimizer_class, seed=4, steps=1)


def saved(folder, optimizer_class=torch.optim.AdamW, **options):
    with dq.Checkpointer(folder, *trained(optimizer_class), **options) as checkpointer:
        checkpointer.save(12)


def hooks(optimizer):
    """Return the hooks that run before a step, without those that record gradients."""
    return [h for h in optimizer._optimizer_step_pre_hooks.values() if "MomentCorrection" in h.__qualname__]


@pytest.mark.parametrize("quality", ["balanced", "small"])
def test_dropped_moments_are_corrected_and_the_record_says_so(tmp_path, quality, caplog):
    saved(tmp_path, quality=quality)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer, quality=quality) as checkpointer:
        with caplog.at_level(logging.INFO, "dynaquant"):
            checkpointer.restore()
        assert "step 12 holds no first moments of 7 parameters: the next steps correct their bias" in caplog.text
        sums = {p: torch.zeros_like(p).double() for p in model.parameters()}
        for k in range(1, 8):
            train(model, optimizer)
            factor = min((1 - BETA ** (12 + k)) / (1 - BETA**k), 3)
            for p in model.parameters():
                sums[p] = BETA * sums[p] + (1 - BETA) * p.grad.double()
                moment = optimizer.state[p]["exp_avg"].double()
                torch.testing.assert_close(moment, factor * sums[p], rtol=1e-5, atol=1e-7)
        assert checkpointer.save(19).result().moments_corrected == 7
        assert [record.moments_corrected for record in checkpointer.records()] == [0, 7]


def test_a_restore_of_exact_moments_leaves_the_optimizer_alone(tmp_path, caplog):
    saved(tmp_path, quality="lossless")
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as checkpointer:
        with caplog.at_level(logging.INFO, "dynaquant"):
            checkpointer.restore()
        assert not hooks(optimizer)
        assert "first moments" not in caplog.text
        assert checkpointer.save(13).result().moments_corrected == 0


@pytest.mark.parametrize(
    "options",
    [
        {"quality": "high"},
        {"keep": dq.Keep(lossless_copy=True)},
        {"roles": {"optimizer.*.exp_avg": "exact"}},
        {"quality": dq.Quality(method="published")},
        {"quality": dq.Quality(correct_moments=False)},
    ],
    ids=str,
)
def test_nothing_is_corrected_if_moments_are_stored_or_the_user_says_no(tmp_path, options):
    saved(tmp_path, **options)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as checkpointer:
        checkpointer.restore()
        assert not hooks(optimizer)
        assert not optimizer._optimizer_load_state_dict_post_hooks


def test_moments_that_have_always_been_zero_are_not_corrected_if_they_are_exact(tmp_path):
    model, optimizer = trained()
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as checkpointer:
        checkpointer.save(12)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as checkpointer:
        checkpointer.restore()
        assert not hooks(optimizer)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Muon"])
def test_momentum_buffers_are_not_corrected(tmp_path, name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    torch.manual_seed(3)
    model = model_of()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = getattr(torch.optim, name)(matrices, 1e-3, momentum=0.9)
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        train(model, optimizer, 3)
        checkpointer.save(3)
        checkpointer.restore()
        assert optimizer.state[matrices[0]]["momentum_buffer"].any() == (name == "Muon")  # the others are dropped
        assert not hooks(optimizer)
        record = checkpointer.save(4).result()
        assert (record.moments_corrected, [note for note in record.notes if "moments" in note]) == (0, [])


class Mine(torch.optim.Adam):
    """An optimizer of the user, which may update its moments in any way."""


def test_the_moments_of_an_unknown_optimizer_are_left_alone_and_the_record_says_so(tmp_path, caplog):
    saved(tmp_path, Mine)
    model, optimizer = other(Mine)
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
        assert not hooks(optimizer)
        (note,) = [note for note in checkpointer.save(13).result().notes if "first moments" in note]
        assert note in caplog.text
    assert note.endswith("roles={'optimizer.*.exp_avg': 'exact'} keeps them")


def test_close_ends_the_correction(tmp_path):
    saved(tmp_path)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
        assert len(hooks(optimizer)) == 1
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_save_removes_the_hook_of_a_correction_that_has_ended(tmp_path):
    saved(tmp_path)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
        train(model, optimizer, 40)
        checkpointer.save(52)
        assert len(hooks(optimizer)) == 1
        train(model, optimizer)
        checkpointer.save(53)
        assert not hooks(optimizer)
        assert checkpointer.save(54).result().moments_corrected == 7


def test_only_a_restore_of_the_optimizer_ends_its_correction(tmp_path):
    saved(tmp_path)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
        train(model, optimizer, 2)
        checkpointer.restore(only="model")
        (hook,) = hooks(optimizer)
        checkpointer.restore(only="optimizer")
        (newer,) = hooks(optimizer)
        assert newer is not hook


def test_a_save_during_the_correction_stores_the_moments_in_training(tmp_path):
    roles = {"optimizer.*.exp_avg": "exact"}
    saved(tmp_path)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer, roles=roles) as checkpointer:
        checkpointer.restore()
        train(model, optimizer, 5)
        moments = {key: of["exp_avg"].clone() for key, of in named_state(optimizer, model=model)["state"].items()}
        checkpointer.save(17)
    model, optimizer = other()
    with dq.Checkpointer(tmp_path, model, optimizer, roles=roles) as checkpointer:
        assert checkpointer.restore() == 17
        assert not hooks(optimizer)
        restored = {key: of["exp_avg"] for key, of in named_state(optimizer, model=model)["state"].items()}
        assert bits(restored) == bits(moments)


def test_several_optimizers_are_corrected_each_for_itself(tmp_path):
    def made():
        torch.manual_seed(3)
        model = model_of()
        parameters = list(model.parameters())
        return model, {"adam": torch.optim.Adam(parameters[:3]), "sgd": torch.optim.SGD(parameters[3:], 0.1, 0.9)}

    def step(model, optimizers):
        torch.nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
        for optimizer in optimizers.values():
            optimizer.step()

    model, optimizers = made()
    step(model, optimizers)
    with dq.Checkpointer(tmp_path, model, optimizers) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore()
        assert [len(hooks(each)) for each in optimizers.values()] == [1, 0]
        step(model, optimizers)
        assert checkpointer.save(2).result().moments_corrected == 3


def test_parameters_whose_state_is_not_restored_are_not_corrected(tmp_path):
    saved(tmp_path)
    torch.manual_seed(4)
    model = model_of()
    model[4] = torch.nn.Linear(24, 50)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
    optimizer.step()
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore(strict=False)
        assert optimizer.state[model[4].weight]["exp_avg"].any()
        assert checkpointer.save(13).result().moments_corrected == 5


def test_an_optimizer_wrapped_by_accelerate_counts_its_real_steps(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    saved(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*other())
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
        weight = accelerator.unwrap_model(model)[4].weight
        total = torch.zeros_like(weight).double()
        for micro_batch in range(8):
            with accelerator.accumulate(model):
                tokens = torch.randint(0, 40, (8,))
                accelerator.backward(torch.nn.functional.cross_entropy(model(tokens), tokens))
                if micro_batch % 2 == 1:
                    total = BETA * total + (1 - BETA) * weight.grad.double()
                optimizer.step()
                optimizer.zero_grad()
        factor = (1 - BETA**16) / (1 - BETA**4)
        moment = optimizer.optimizer.state[weight]["exp_avg"].double()
        torch.testing.assert_close(moment, factor * total, rtol=1e-5, atol=1e-7)


def test_moments_of_an_optimizer_without_a_state_are_corrected(tmp_path):
    saved(tmp_path)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore()
        train(model, optimizer)
        weight = model[4].weight
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], 0.3 * weight.grad)


def test_parameters_that_only_their_order_identifies_are_corrected(tmp_path):
    """An optimizer may update tensors of no module, such as master weights."""

    def made():
        values = [torch.nn.Parameter(torch.arange(6.0) + i) for i in range(2)]
        optimizer = torch.optim.Adam(values)
        for value in values:
            value.grad = torch.ones(6)
        optimizer.step()
        return optimizer

    with dq.Checkpointer(tmp_path, model_of(), made()) as checkpointer:
        checkpointer.save(1)
    optimizer = made()
    with dq.Checkpointer(tmp_path, model_of(), optimizer) as checkpointer:
        checkpointer.restore()
        optimizer.step()
        for state in optimizer.state.values():
            torch.testing.assert_close(state["exp_avg"], torch.full((6,), 0.19))
