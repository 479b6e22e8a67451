"""A hook records the gradients that an optimizer's steps use, averaged over a window of steps."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

import dynaquant as dq
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.engine.tensors.codebook import RUNGS_PER_OCTAVE
from dynaquant.saving.presets import BALANCED, PRESETS
from dynaquant.store.run import Run
from dynaquant.training.gradients import SMOOTHING, GradientRecorder, Scaling, sums_of_squares


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def parts(make=lambda p: optim.SGD(p, lr=0.1), window=50, interval=None):
    model = model_of()
    optimizer = make(model.parameters())
    recorder = GradientRecorder(dict(model.named_parameters()), optimizer, window, interval)
    return model, optimizer, recorder


def backward(model, batch, scale=1.0):
    (model(batch).square().mean() * scale).backward()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(model, optimizer, batches):
    """Take a step on every batch. Returns the gradients of every step."""
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        seen.append(gradients(model))
        optimizer.step()
    return seen


def average(seen):
    result = {name: gradient.clone() for name, gradient in seen[0].items()}
    for step in seen[1:]:
        for name, gradient in step.items():
            result[name] = SMOOTHING * gradient + (1 - SMOOTHING) * result[name]
    return result


def check_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_moving_average_weighs_the_last_gradients_most(steps):
    model, optimizer, recorder = parts(optim.AdamW)
    seen = train(model, optimizer, torch.randn(steps, 5, 4))
    check_close(recorder.collect(), average(seen))


def test_accumulated_gradients_count_as_one_gradient():
    model, optimizer, recorder = parts()
    for batch in torch.randn(3, 5, 4):
        backward(model, batch)
    accumulated = gradients(model)
    optimizer.step()
    check_close(recorder.collect(), accumulated)


def test_clipped_gradients_are_recorded_clipped():
    model, optimizer, recorder = parts()
    backward(model, torch.randn(5, 4) * 100)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    total = torch.cat([gradient.flatten() for gradient in recorder.collect().values()]).norm()
    assert total == pytest.approx(0.01, rel=1e-3)


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "fused Adam": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "foreach Adam": lambda p: optim.Adam(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_scaled_gradients_are_recorded_unscaled(name, unscale_first):
    model, optimizer, recorder = parts(OPTIMIZERS[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for batch in torch.randn(3, 5, 4):
        optimizer.zero_grad()
        backward(model, batch)
        seen.append(gradients(model))
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    check_close(recorder.collect(), average(seen))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_a_scaler_skips_do_not_count(name):
    model, optimizer, recorder = parts(OPTIMIZERS[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(model, torch.ones(5, 4))
    good = gradients(model)
    for batch in (torch.ones(5, 4), torch.full((5, 4), float("inf"))):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    check_close(recorder.collect(), good)


def test_a_step_that_a_scaler_skips_does_not_count_for_the_finite_gradients_of_a_fused_optimizer():
    model, optimizer, recorder = parts(OPTIMIZERS["fused Adam"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(5, 4)).square().mean()).backward()
    model[0].bias.grad[0] = float("inf")
    before = model[2].weight.clone()
    scaler.step(optimizer)
    assert torch.equal(model[2].weight, before)
    assert recorder.collect() == {}


def test_gradients_of_other_dtypes_are_recorded_as_float32():
    model = model_of().to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    recorder = GradientRecorder(dict(model.named_parameters()), optimizer, 50)
    backward(model, torch.randn(5, 4, dtype=torch.bfloat16))
    expected = gradients(model)
    optimizer.step()
    recorded = recorder.collect()
    assert {gradient.dtype for gradient in recorded.values()} == {torch.float32}
    check_close(recorded, expected)


def test_later_gradients_do_not_change_collected_ones():
    model, optimizer, recorder = parts()
    (seen,) = train(model, optimizer, torch.randn(1, 5, 4))
    optimizer.zero_grad(set_to_none=False)
    backward(model, torch.randn(5, 4))
    check_close(recorder.collect(), seen)


def test_each_collect_starts_again():
    model, optimizer, recorder = parts()
    train(model, optimizer, torch.randn(3, 5, 4))
    recorder.collect()
    assert recorder.collect() == {}
    seen = train(model, optimizer, torch.randn(2, 5, 4))
    check_close(recorder.collect(), average(seen))


def test_only_the_last_steps_before_the_next_checkpoint_are_recorded():
    model, optimizer, recorder = parts(window=3, interval=10)
    seen = train(model, optimizer, torch.randn(10, 5, 4))
    check_close(recorder.collect(), average(seen[7:]))


def test_the_next_interval_is_expected_to_be_as_long_as_the_last():
    model, optimizer, recorder = parts(window=3, interval=10)
    train(model, optimizer, torch.randn(6, 5, 4))
    assert recorder.collect() == {}
    seen = train(model, optimizer, torch.randn(6, 5, 4))
    check_close(recorder.collect(), average(seen[3:]))


def test_an_announced_interval_replaces_the_last_one():
    model, optimizer, recorder = parts(window=3, interval=10)
    train(model, optimizer, torch.randn(10, 5, 4))
    recorder.collect()
    recorder.expect(5)
    seen = train(model, optimizer, torch.randn(5, 5, 4))
    check_close(recorder.collect(), average(seen[2:]))
    recorder.expect(20)
    train(model, optimizer, torch.randn(17, 5, 4))
    assert recorder.collect() == {}


def test_an_unknown_interval_is_expected_to_be_as_long_as_the_last():
    model, optimizer, recorder = parts(window=3)
    train(model, optimizer, torch.randn(6, 5, 4))
    recorder.collect()
    recorder.expect(None)
    seen = train(model, optimizer, torch.randn(6, 5, 4))
    check_close(recorder.collect(), average(seen[3:]))


def test_a_late_checkpoint_gets_all_steps_since_the_window_began():
    model, optimizer, recorder = parts(window=3, interval=5)
    seen = train(model, optimizer, torch.randn(9, 5, 4))
    check_close(recorder.collect(), average(seen[2:]))


def test_a_window_longer_than_the_interval_records_every_step():
    model, optimizer, recorder = parts(window=50, interval=4)
    seen = train(model, optimizer, torch.randn(4, 5, 4))
    check_close(recorder.collect(), average(seen))


def test_two_collects_without_a_step_between_keep_the_interval():
    model, optimizer, recorder = parts(window=2, interval=4)
    train(model, optimizer, torch.randn(4, 5, 4))
    recorder.collect()
    assert recorder.collect() == {}
    seen = train(model, optimizer, torch.randn(4, 5, 4))
    check_close(recorder.collect(), average(seen[2:]))


def test_forgetting_starts_the_interval_again():
    model, optimizer, recorder = parts(window=2, interval=4)
    train(model, optimizer, torch.randn(3, 5, 4))
    recorder.forget()
    assert recorder.collect() == {}
    train(model, optimizer, torch.randn(3, 5, 4))
    recorder.forget()
    seen = train(model, optimizer, torch.randn(4, 5, 4))
    check_close(recorder.collect(), average(seen[2:]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_with_nans_or_infinities_are_skipped(bad):
    model, optimizer, recorder = parts()
    (first,) = train(model, optimizer, torch.randn(1, 5, 4))
    optimizer.zero_grad()
    backward(model, torch.randn(5, 4))
    second = gradients(model)
    model[0].weight.grad[0, 0] = bad
    optimizer.step()
    check_close(recorder.collect(), average([first, second]) | {"0.weight": first["0.weight"]})


def test_large_finite_gradients_are_recorded():
    model, optimizer, recorder = parts()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    optimizer.step()
    assert len(recorder.collect()) == 4


def test_parameters_without_gradients_are_missing_from_the_result():
    model, optimizer, recorder = parts()
    model[0].requires_grad_(False)
    backward(model, torch.randn(5, 4))
    optimizer.step()
    assert list(recorder.collect()) == ["2.weight", "2.bias"]


def test_only_the_named_parameters_are_recorded_in_every_group():
    model = model_of()
    optimizer = optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    recorder = GradientRecorder({"a": model[0].weight, "b": model[2].weight}, optimizer, 50)
    (seen,) = train(model, optimizer, torch.randn(1, 5, 4))
    check_close(recorder.collect(), {"a": seen["0.weight"], "b": seen["2.weight"]})


def test_sparse_gradients_are_left_out():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SGD(embedding.parameters(), lr=0.1)
    recorder = GradientRecorder({"w": embedding.weight}, optimizer, 50)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert recorder.collect() == {}


def test_recording_does_not_change_training():
    def weights(record):
        model = model_of()
        optimizer = optim.AdamW(model.parameters())
        if record:
            GradientRecorder(dict(model.named_parameters()), optimizer, 50)
        train(model, optimizer, torch.randn(5, 5, 4, generator=torch.Generator().manual_seed(3)))
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(record=True), weights(record=False))


def test_close_removes_the_hook_and_ends_recording():
    model, optimizer, recorder = parts()
    recorder.close()
    train(model, optimizer, torch.randn(2, 5, 4))
    assert recorder.collect() == {}
    assert not optimizer._optimizer_step_pre_hooks


def test_a_checkpoint_uses_the_gradients_of_all_its_optimizers(tmp_path, monkeypatch):
    # No bound on grid steps but that of the gradients.
    monkeypatch.setitem(PRESETS, "balanced", replace(BALANCED, step_limits=LOOSEST_LIMITS))
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(2))
    main, other = (optim.SGD(layer.parameters(), lr=1e-6) for layer in layers)
    with dq.Checkpointer(tmp_path, layers, main, extras={"other": other}) as ckpt:
        for scale, layer in zip((1, 4), layers, strict=True):
            layer.weight.grad = scale * torch.randn(40, 40)
        main.step()
        other.step()
        ckpt.save(1).result()
    run = Run(tmp_path)
    stored = run.load(run.file(1))
    rungs = [stored[f"model.{i}.weight"].codebook.rung for i in range(2)]
    assert rungs[0] - rungs[1] == pytest.approx(RUNGS_PER_OCTAVE * math.log2(4), abs=1)


def test_sums_of_squares_are_those_of_each_gradient():
    def some(dtype, *shape):
        return torch.randn(shape).to(dtype)

    gradients = [
        {
            "small": some(torch.float32, 30, 7),
            "half": some(torch.bfloat16, 40),
            "double": some(torch.float64, 3),
            "large": some(torch.float32, 600, 600),
            "empty": some(torch.float32, 0, 4),
            "scalar": some(torch.float32),
            "infinite": torch.tensor([1.0, math.inf]),
        }
        for _ in range(3)
    ]
    gradients[1]["new"] = some(torch.float32, 5)
    del gradients[2]["half"]
    recorded = {}
    for each in gradients:
        recorded |= sums_of_squares(each, recorded, Scaling())
    assert recorded.pop("infinite") == recorded.pop("empty") == 0
    for name, found in recorded.items():
        seen = [each[name].double().square().mean() for each in gradients if name in each]
        assert float(found) == pytest.approx(float(sum(seen)), rel=1e-5)
        assert found.dtype == torch.float32


def test_sums_of_squares_of_scaled_gradients_are_unscaled_and_leave_out_skipped_steps():
    gradients, scale = {"a": torch.randn(5), "b": torch.randn(600, 600)}, torch.tensor([512.0])
    expected = sums_of_squares(gradients, {}, Scaling())
    scaled = {name: 512 * gradient for name, gradient in gradients.items()}
    recorded = sums_of_squares(scaled, {}, Scaling(scale, torch.tensor(0.0)))
    recorded = sums_of_squares(scaled, recorded, Scaling(scale, torch.tensor(1.0)))
    for name, found in recorded.items():
        torch.testing.assert_close(found, expected[name])
        assert found.dim() == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_changes_nothing_in_what_a_checkpoint_of_sgd_knows(fused, tmp_path):
    def rungs(scaled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 2))
        optimizer = optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        with dq.Checkpointer(tmp_path / str(scaled), model, optimizer) as checkpointer:
            for batch in torch.randn(5, 5, 40):
                optimizer.zero_grad()
                scaler.scale(model(batch).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            checkpointer.save(5).result()
        run = Run(tmp_path / str(scaled))
        return {
            entry.name: entry.scheme.to_json() for entry in run.newest().header.entries if entry.label.role == "weight"
        }

    assert rungs(True) == rungs(False)


def test_gradients_that_have_gradients_are_recorded_without_their_graph():
    model, optimizer, _ = parts()
    recorder = GradientRecorder(dict(model.named_parameters()), optimizer, 50, accumulate=sums_of_squares)
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(torch.randn(5, 4)).square().mean(), parameters, create_graph=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert not any(recorded.requires_grad for recorded in recorder.collect().values())


def test_what_was_recorded_on_another_device_is_added():
    gradients = {"w": torch.ones(3, device="meta")}
    assert sums_of_squares(gradients, {"w": torch.tensor(1.0)}, Scaling())["w"].device.type == "meta"
