"""Parts of a checkpoint, several models and optimizers, and plain values as extras."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from training import bits, model_of, named_state, train

import dynaquant as dq
from dynaquant.interop.export import Target, export
from dynaquant.restore.stored_checkpoint import StoredCheckpoint


def training(seed=0, optimizer=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = model_of()
    return model, optimizer(model.parameters(), lr=1e-2)


@pytest.fixture
def folder(tmp_path):
    """A run of one lossless checkpoint of step 4, with a scheduler."""
    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with dq.Checkpointer(tmp_path / "run", model, optimizer, extras={"scheduler": scheduler}) as ckpt:
        train(model, optimizer, 4)
        scheduler.step()
        ckpt.save(4)
    return tmp_path / "run"


def stored_weights(folder) -> dict:
    return {name: bits(tensor) for name, tensor in dq.load(folder)["model"].items()}


def weights(model) -> dict:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


# Restoring only some objects


def test_only_the_weights_can_be_restored(folder):
    model, optimizer = training(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    train(model, optimizer)
    before, state = torch.get_rng_state(), bits(optimizer.state_dict())
    with dq.Checkpointer(folder, model, optimizer, extras={"scheduler": scheduler}) as ckpt:
        assert ckpt.restore(only="model") == 4
        assert (ckpt.not_restored, scheduler.last_epoch) == ([], 0)
        assert weights(model) == stored_weights(folder)
        assert bits(optimizer.state_dict()) == state
        assert torch.equal(torch.get_rng_state(), before)
        train(model, optimizer)
        assert ckpt.save(5).result().parent == 4


@pytest.mark.parametrize("only", [None, "optimizer"])
def test_moments_of_a_parameter_with_another_dtype_are_left_out(folder, only):
    model, optimizer = training(1, lambda parameters, lr: torch.optim.AdamW(list(parameters), lr))
    model = model.to(torch.bfloat16)
    with dq.Checkpointer(folder, model, optimizer) as ckpt:
        with pytest.raises(dq.StateError, match="is that of a parameter in float32, which is in bfloat16 now"):
            ckpt.restore(only=only)
        assert ckpt.restore(only=only, strict=False) == 4
        assert any("is that of a parameter in float32" in what for what in ckpt.not_restored)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_partial_restore_needs_no_objects_for_other_parts(folder):
    model, _ = training(1)
    with dq.Checkpointer(folder, model) as ckpt:
        with pytest.raises(dq.StateError, match="the checkpoint has 'optimizer', which was not given"):
            ckpt.restore()
        assert ckpt.restore(only=["model"]) == 4
    assert weights(model) == stored_weights(folder)


def test_only_the_optimizer_and_the_generators_can_be_restored(folder):
    model, optimizer = training(1)
    before = weights(model)
    with dq.Checkpointer(folder, model, optimizer) as ckpt:
        assert ckpt.restore(only=("optimizer", "rng")) == 4
    assert weights(model) == before
    assert bits(named_state(optimizer, model=model)) == bits(dq.load(folder)["optimizer"])
    assert torch.equal(torch.get_rng_state(), dq.load(folder)["rng"]["torch"])


@pytest.mark.parametrize("only", ["weights", ("model", "ema"), ()])
def test_unknown_names_in_only_are_refused(folder, only):
    with (
        dq.Checkpointer(folder, *training(1)) as ckpt,
        pytest.raises(ValueError, match="there are model, optimizer, rng"),
    ):
        ckpt.restore(only=only)


# Leaving out what does not fit (strict=False)


def test_parts_that_do_not_fit_are_left_unchanged_and_listed(folder, caplog):
    model, _ = training(1)
    model[4] = nn.Linear(24, 7)
    model.append(nn.Linear(7, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = weights(model)
    with dq.Checkpointer(folder, model, optimizer, extras={"progress": {}}) as ckpt:
        assert ckpt.restore(strict=False) == 4
        said = ckpt.not_restored
        assert "the checkpoint has no extra 'progress'" in said
        assert "the checkpoint has an extra 'scheduler', which was not given" in said
        assert "model.4.weight was float32[40, 24] and is float32[7, 24]" in said
        assert "model.5.weight is not in the checkpoint" in said
        assert "optimizer had no parameter model.5.weight" in said
        assert any(
            text.startswith("optimizer.state.model.4.weight.exp_avg is [40, 24] in the checkpoint") for text in said
        )
        shown = "; ".join(said[:3])
        assert caplog.messages == [
            f"restored step 4, but left out what does not fit, {len(said)} differences: {shown}; "
            f"and {len(said) - 3} more (not_restored lists them, and the log at level INFO)"
        ]
        now, stored = weights(model), stored_weights(folder)
        assert all(now[name] == (before[name] if name[0] in "45" else stored[name]) for name in now)
        state = {p: len(of) for p, of in optimizer.state.items()}
        assert set(state) == {p for name, p in model.named_parameters() if name[0] not in "45"}
        train(model, optimizer, 2)
        assert ckpt.save(5).result().parent == 4
        assert (ckpt.restore(), ckpt.not_restored) == (5, [])


def test_another_optimizer_starts_without_state(folder):
    model, optimizer = training(1, torch.optim.SGD)
    with dq.Checkpointer(folder, model, optimizer) as ckpt:
        assert ckpt.restore(strict=False) == 4
        assert "optimizer was torch.optim.adamw.AdamW and is torch.optim.sgd.SGD" in ckpt.not_restored
    assert weights(model) == stored_weights(folder)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_load_into_loads_what_fits_and_returns_what_does_not(folder):
    model, _ = training(1)
    model[4] = nn.Linear(24, 7)
    before = weights(model)
    with pytest.raises(dq.StateError, match=r"4.weight is \[40, 24\] in the checkpoint and \[7, 24\] in the model"):
        dq.load_into(model, folder)
    assert weights(model) == before
    left = dq.load_into(model, folder, strict=False)
    assert left == [
        "4.bias is [40] in the checkpoint and [7] in the model",
        "4.weight is [40, 24] in the checkpoint and [7, 24] in the model",
    ]
    now, stored = weights(model), stored_weights(folder)
    assert all(now[name] == (before[name] if name[0] == "4" else stored[name]) for name in now)
    with pytest.raises(dq.StateError, match="does not fit the model"):
        dq.load_into(nn.Conv2d(3, 3, 3), folder, strict=False)
    assert dq.load_into(training(1)[0], folder) == []


# Several models and optimizers


def adversaries(seed=0):
    torch.manual_seed(seed)
    models = {"G": nn.Sequential(nn.Linear(8, 40)), "D": model_of()}
    optimizers = {
        "G": torch.optim.AdamW(models["G"].parameters(), lr=1e-2),
        "D": torch.optim.SGD(models["D"].parameters(), lr=0.1, momentum=0.9),
    }
    return models, optimizers


def train_both(models, optimizers, steps):
    for _ in range(steps):
        train(models["D"], optimizers["D"])
        models["G"](torch.randn(4, 8)).square().mean().backward()
        optimizers["G"].step()
        optimizers["G"].zero_grad()


def loss_of_both(models) -> float:
    assert {name: type(model) for name, model in models.items()} == {"G": nn.Sequential, "D": nn.Sequential}
    tokens = torch.arange(40)
    loss = nn.functional.cross_entropy(models["D"].eval()(tokens), tokens)
    return float(loss + models["G"].eval()(torch.ones(2, 8)).square().mean())


@pytest.mark.parametrize("method", ["grid", "published"])
def test_several_models_and_optimizers_are_saved_and_restored_together(tmp_path, method):
    models, optimizers = adversaries()
    with dq.Checkpointer(
        tmp_path, models, optimizers, evaluate=loss_of_both, quality=dq.Quality(method=method)
    ) as ckpt:
        train_both(models, optimizers, 4)
        record = ckpt.save(4).result()
        train_both(models, optimizers, 2)
        assert ckpt.save(6).result().parent == 4
    assert record.quality.degradation <= 0.01
    entries = {entry.name: entry.label.role for entry in StoredCheckpoint(tmp_path).file.header.entries}
    assert entries["model.G.0.weight"] == entries["model.D.1.weight"] == "weight"
    assert entries["optimizer.G.state.model.G.0.weight.exp_avg_sq"] == "second_moment"
    assert entries["optimizer.D.state.model.D.1.weight.momentum_buffer"] == "first_moment"
    state = dq.load(tmp_path)
    models, optimizers = adversaries(1)
    with dq.Checkpointer(tmp_path, models, optimizers, evaluate=loss_of_both) as ckpt:
        assert ckpt.restore() == 6
    for name in ("G", "D"):
        assert bits(models[name].state_dict()) == bits(state["model"][name])
        assert bits(named_state(optimizers[name], **{f"model.{name}": models[name]})) == bits(state["optimizer"][name])


def test_one_of_several_models_is_restored_without_the_others(tmp_path):
    models, optimizers = adversaries()
    with dq.Checkpointer(tmp_path, models, optimizers, quality="lossless") as ckpt:
        train_both(models, optimizers, 2)
        ckpt.save(2).result()
    others, other_optimizers = adversaries(1)
    before = weights(others["D"])
    with dq.Checkpointer(tmp_path, others, other_optimizers) as ckpt:
        ckpt.restore(only="model.G")
    assert weights(others["G"]) == weights(models["G"])
    assert weights(others["D"]) == before
    with dq.Checkpointer(tmp_path, {"G": others["G"]}) as ckpt:
        with pytest.raises(dq.StateError, match=r"the checkpoint has 'model\.D', which was not given"):
            ckpt.restore()
        assert ckpt.restore(strict=False) == 2
    assert weights(dq_loaded := nn.ModuleDict(others)) != weights(nn.ModuleDict(models))
    assert dq.load_into(others, tmp_path) == []
    assert weights(dq_loaded) == weights(nn.ModuleDict(models))
    export(StoredCheckpoint(tmp_path), Target.SAFETENSORS, tmp_path / "both.safetensors")
    assert len(StoredCheckpoint(tmp_path).state_dict) == len(nn.ModuleDict(models).state_dict())


def test_a_single_model_does_not_fit_a_checkpoint_of_several(tmp_path):
    models, optimizers = adversaries()
    with dq.Checkpointer(tmp_path, models, optimizers) as ckpt:
        ckpt.save(2).result()
    with (
        dq.Checkpointer(tmp_path, models["D"], optimizers["D"]) as ckpt,
        pytest.raises(dq.StateError, match="does not fit"),
    ):
        ckpt.restore()


def test_optimizers_may_be_a_sequence_and_a_loss_on_batches_takes_several_models(tmp_path):
    model, _ = training()
    optimizers = [torch.optim.SGD(model[0].parameters(), momentum=0.9), torch.optim.AdamW(model[1:].parameters())]
    evaluate = dq.LossOn([torch.arange(40)], lambda m, x: nn.functional.cross_entropy(m["only"](x), x))
    with dq.Checkpointer(tmp_path, {"only": model}, optimizers, evaluate=evaluate, roles={"optimizer.*": "exact"}) as c:
        train(model, optimizers[0])
        optimizers[1].step()
        c.save(1).result()
        assert c.restore() == 1
    assert list(dq.load(tmp_path)["optimizer"]) == ["0", "1"]


@pytest.mark.parametrize("models", [{}, {"a.b": nn.Linear(1, 1)}, {"keys": nn.Linear(1, 1)}, {3: nn.Linear(1, 1)}])
def test_invalid_names_of_models_are_refused(tmp_path, models):
    with pytest.raises(ValueError, match=r"^model"):
        dq.Checkpointer(tmp_path, models)


# Plain values


@dataclass
class Progress:
    epoch: int = 0
    best: float | None = None
    losses: list = field(default_factory=list)


def test_dictionaries_lists_and_dataclasses_are_saved_by_value_and_updated_in_place(tmp_path):
    counts, history, progress = {"epoch": 0, "seen": {"a": 1}}, [1], Progress()
    extras = {"counts": counts, "history": history, "progress": progress}
    with dq.Checkpointer(tmp_path, model_of(), extras=extras) as ckpt:
        counts["epoch"], counts["seen"]["b"], progress.epoch, progress.best = 3, torch.ones(2), 4, 0.5
        history.append([2.5])
        progress.losses.append(0.25)
        ckpt.save(1)
        counts["epoch"], progress.best, losses = 7, 9.0, progress.losses
        counts["new"] = history[1][0] = progress.losses[0] = None
    model, seen, inner = model_of(), counts["seen"], history[1]
    with dq.Checkpointer(tmp_path, model, extras=extras) as ckpt:
        assert ckpt.restore() == 1
    assert (counts["epoch"], list(counts), counts["seen"]["a"]) == (3, ["epoch", "seen"], 1)
    assert torch.equal(counts["seen"]["b"], torch.ones(2))
    assert (history, progress) == ([1, [2.5]], Progress(4, 0.5, [0.25]))
    assert counts["seen"] is seen
    assert (history[1] is inner, progress.losses is losses) == (True, True)


def test_a_plain_extra_of_another_type_or_with_other_fields_does_not_fit(tmp_path):
    @dataclass
    class Less:
        epoch: int = 0

    with dq.Checkpointer(tmp_path, model_of(), extras={"counts": {"a": 1}, "progress": Progress(5)}) as ckpt:
        ckpt.save(1)
    counts, less = [], Less()
    with dq.Checkpointer(tmp_path, model_of(), extras={"counts": counts, "progress": less}) as ckpt:
        with pytest.raises(dq.StateError, match="counts was a dict and is a list"):
            ckpt.restore()
        assert (counts, less) == ([], Less())
        assert ckpt.restore(strict=False) == 1
    assert "progress had a field 'best', which it does not have now" in ckpt.not_restored
    assert (counts, less) == ([], Less(5))


# Objects that are left out are unchanged


def test_objects_that_are_left_out_are_not_overwritten(tmp_path):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        train(model, optimizer, 5)
        ckpt.save(5)
    torch.manual_seed(1)
    other = nn.Sequential(*list(model_of())[:-1], nn.Linear(24, 50))  # a new head
    its_own = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for _ in range(2):
        other(torch.randint(0, 40, (8,))).sum().backward()
        its_own.step()
    before = bits(its_own.state[other[-1].weight])
    with dq.Checkpointer(tmp_path, other, its_own) as ckpt:
        assert ckpt.restore(strict=False) == 5
    assert bits(its_own.state[other[-1].weight]) == before
    assert float(its_own.state[other[1].weight]["step"]) == 5


def test_a_parameter_group_merged_from_two_keeps_its_own_learning_rate(tmp_path, caplog):
    model, _ = training()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": torch.tensor(0.5)}, {"params": parameters[2:], "lr": torch.tensor(0.02)}]
    with dq.Checkpointer(tmp_path, model, torch.optim.AdamW(groups)) as ckpt:
        ckpt.save(1)
    merged = torch.optim.AdamW(parameters, lr=torch.tensor(0.01))
    with dq.Checkpointer(tmp_path, model, merged) as ckpt:
        ckpt.restore()
    assert float(merged.param_groups[0]["lr"]) == pytest.approx(0.01)
    assert "keep their own lr" in caplog.text


class Stubborn:
    def state_dict(self):
        return {}

    def load_state_dict(self, _state):
        raise RuntimeError("not today")


def test_extras_are_put_back_even_if_putting_back_one_of_them_fails(tmp_path):
    model, optimizer = training()
    progress = {"epoch": 1}
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"progress": progress, "z": Stubborn()}) as ckpt:
        ckpt.save(1)
        progress["epoch"] = 2
        with pytest.raises(RuntimeError, match="not today"):
            ckpt.restore()
    assert progress == {"epoch": 2}


def test_tensors_in_a_dictionary_are_restored_in_place(tmp_path):
    model, optimizer = training()
    total = torch.ones(3)
    statistics = {"total": total}
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"statistics": statistics}) as ckpt:
        ckpt.save(1)
        total += 1
        ckpt.restore()
    assert statistics["total"] is total
    assert total.tolist() == [1, 1, 1]


def test_an_object_that_is_not_an_optimizer_is_refused(tmp_path):
    model, optimizer = training()
    with pytest.raises(dq.StateError, match="optimizer must be an optimizer, not a StepLR"):
        dq.Checkpointer(tmp_path, model, torch.optim.lr_scheduler.StepLR(optimizer, 3))
