"""An optimizer's state is keyed by parameter name, so that groups can be reordered, divided or merged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from make_golden import STEPS, Extra, Masters, Model
from torch import nn
from training import bits, model_of, named_state, train

import dynaquant as dq
from dynaquant.interop.export import Target, export
from dynaquant.restore.stored_checkpoint import StoredCheckpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


def matrices_and_vectors(model: nn.Module) -> list[dict]:
    """Return two groups: matrices with weight decay, vectors without."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def saved(folder, groups=lambda model: model.parameters(), **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train for four steps and save losslessly. Returns model and optimizer."""
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(groups(model), **({"lr": 1e-2} | options))
    with dq.Checkpointer(folder, model, optimizer, quality="lossless") as ckpt:
        train(model, optimizer, 4)
        ckpt.save(4).result()
    return model, optimizer


def restored(folder, groups, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = model_of()
    optimizer = torch.optim.AdamW(groups(model), **({"lr": 1e-2} | options))
    with dq.Checkpointer(folder, model, optimizer, quality="lossless") as ckpt:
        assert ckpt.restore() == 4
    return model, optimizer


def moments(model, optimizer) -> dict:
    """Return the state of every parameter, sorted by name."""
    return dict(sorted(bits(named_state(optimizer, model=model)["state"])[1]))


def test_tensors_of_an_optimizer_are_named_after_their_parameters(tmp_path):
    model, optimizer = saved(tmp_path)
    names = StoredCheckpoint(tmp_path).tensors
    assert {f"optimizer.state.model.{name}.exp_avg" for name, _ in model.named_parameters()} <= set(names)
    assert bits(dq.load(tmp_path)["optimizer"]) == bits(named_state(optimizer, model=model))


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: list(model.parameters())[::-1],
        lambda model: [{"params": [p]} for p in model.parameters()],
        matrices_and_vectors,
        lambda model: model.named_parameters(),
    ],
    ids=["reversed", "one each", "divided", "named"],
)
def test_with_other_groups_each_parameter_keeps_its_state_and_training_is_identical(tmp_path, groups):
    model, optimizer = saved(tmp_path, weight_decay=0.0)
    other, other_optimizer = restored(tmp_path, groups, weight_decay=0.0)
    assert moments(other, other_optimizer) == moments(model, optimizer)
    for group in other_optimizer.param_groups:
        group["weight_decay"] = 0.0
    torch.manual_seed(2)
    train(model, optimizer, 3)
    torch.manual_seed(2)
    train(other, other_optimizer, 3)
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_groups_in_another_order_keep_their_hyperparameters(tmp_path):
    saved(tmp_path, matrices_and_vectors)
    _, optimizer = restored(tmp_path, lambda model: matrices_and_vectors(model)[::-1], weight_decay=9.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.3]


@pytest.mark.parametrize("number", [np.float32(1e-4), np.float64(1e-4), np.int64(0), np.bool_(True)], ids=repr)
def test_a_hyperparameter_that_is_a_number_of_numpy_is_restored_into_a_plain_one(tmp_path, number):
    key = "amsgrad" if isinstance(number, np.bool_) else "weight_decay"
    saved(tmp_path, **{key: number})
    _, optimizer = restored(tmp_path, lambda model: model.parameters())
    assert optimizer.param_groups[0][key] == number


def test_a_divided_group_restores_only_hyperparameters_on_which_its_parts_agree(tmp_path, caplog):
    saved(tmp_path, lr=0.005, betas=(0.8, 0.9))
    _, optimizer = restored(tmp_path, matrices_and_vectors, lr=1.0)
    found = [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(0.005, (0.8, 0.9), 0.3), (0.005, (0.8, 0.9), 0.0)]
    assert any("the changed groups keep their own weight_decay" in message for message in caplog.messages)


def test_merged_groups_restore_the_hyperparameters_on_which_they_agreed(tmp_path, caplog):
    saved(tmp_path, matrices_and_vectors, lr=0.005)
    _, optimizer = restored(tmp_path, lambda model: model.parameters(), lr=1.0, weight_decay=0.7)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.005, 0.7)
    assert any("the changed groups keep their own weight_decay" in message for message in caplog.messages)


def test_a_scheduler_continues_with_groups_in_another_order(tmp_path):
    def training(order):
        torch.manual_seed(0)
        model = model_of()
        groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())]
        optimizer = torch.optim.SGD(groups[::order], momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = training(1)
    train(model, optimizer)
    scheduler.step()
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"scheduler": scheduler}) as ckpt:
        ckpt.save(1)
    other, other_optimizer, other_scheduler = training(-1)
    with dq.Checkpointer(tmp_path, other, other_optimizer, extras={"scheduler": other_scheduler}) as ckpt:
        ckpt.restore()
    other_scheduler.step()
    assert [g["lr"] for g in other_optimizer.param_groups] == [g["lr"] / 2 for g in optimizer.param_groups[::-1]]


def test_parameters_of_saved_modules_are_keyed_by_name_and_others_by_position(tmp_path):
    model = model_of()
    masters = nn.ParameterList([p.detach().clone() for p in model.parameters()])
    loose = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([*masters, loose], lr=0.1, momentum=0.9)
    for p in [*masters, loose]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"masters": masters}, quality="lossless") as ckpt:
        ckpt.save(1)
    assert list(dq.load(tmp_path)["optimizer"]["state"]) == [
        *(f"masters.{i}" for i in range(len(masters))),
        len(masters),
    ]
    optimizer.param_groups[0]["params"].reverse()
    with (
        dq.Checkpointer(tmp_path, model, optimizer, extras={"masters": masters}) as ckpt,
        pytest.raises(dq.StateError, match="no saved module has; only their order identifies them"),
    ):
        ckpt.restore()


def test_an_optimizer_with_one_state_for_all_parameters_needs_their_order(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 3)) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1)
    state = bits(optimizer.state_dict())
    for order, fits in ((1, True), (-1, False)):
        other = torch.optim.LBFGS(list(model.parameters())[::order])
        with dq.Checkpointer(tmp_path, model, other) as ckpt:
            if fits:
                assert ckpt.restore() == 1
                assert bits(other.state_dict()) == state
            else:
                with pytest.raises(dq.StateError, match="one state for all its parameters in order"):
                    ckpt.restore()


def test_the_weights_of_lbfgs_are_exact_from_its_first_step_on(tmp_path):
    """Rounding between two gradients would pass for a curvature, and the training diverge."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 20)

    def training() -> tuple[nn.Module, torch.optim.LBFGS]:
        model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5)

    def steps(model, optimizer) -> dict:
        def closure():
            optimizer.zero_grad()
            loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return bits(model.state_dict())

    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert "weight" in ckpt.save(0).result().roles
        steps(model, optimizer)
        record = ckpt.save(3).result()
        assert set(record.roles) == {"exact"}
        assert any("as LBFGS does" in note for note in record.notes)
        after = steps(model, optimizer)
    again = training()
    with dq.Checkpointer(tmp_path, *again) as ckpt:
        assert ckpt.restore() == 3
        assert steps(*again) == after
    with dq.Checkpointer(tmp_path, *again, roles={"model.*": "weight"}) as ckpt:
        assert "weight" in ckpt.save(6).result().roles


def test_pytorch_loads_the_stored_and_the_exported_state(tmp_path):
    _, optimizer = saved(tmp_path)
    out = tmp_path / "state.pt"
    export(StoredCheckpoint(tmp_path), Target.TORCH_STATE, out)
    for state in (dq.load(tmp_path), torch.load(out, weights_only=False)):
        other = model_of()
        other_optimizer = torch.optim.AdamW(other.parameters())
        other_optimizer.load_state_dict(state["optimizer"])
        assert bits(other_optimizer.state_dict()) == bits(optimizer.state_dict())


def test_a_pattern_for_parameters_does_not_select_moments(tmp_path):
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dq.Checkpointer(tmp_path, model, optimizer, roles={"*.1.*": "exact", "*4*": "weight"}) as ckpt:
        train(model, optimizer)
        ckpt.save(1).result()
    roles = {entry.name: entry.label.role for entry in StoredCheckpoint(tmp_path).file.header.entries}
    assert (roles["model.1.weight"], roles["model.4.weight"]) == ("exact", "weight")
    assert {role for name, role in roles.items() if name.endswith(".exp_avg_sq")} == {"second_moment"}


def test_golden_files_are_restored_and_the_run_goes_on(tmp_path):
    folder = GOLDEN
    steps = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*")]
    step = max(step for step in steps if step in STEPS)  # later ones hold a model only
    wanted = dq.load(folder, step)
    for path in folder.glob("*.dqc"):
        if path.name <= f"step-{step:012d}.dqc":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(5)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[::2]}, {"params": trained[1::2]}])
    objects = {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(trained), 1e-2, 120),
        "order": np.random.default_rng(0),
        "extra": Extra(),
        "masters": (masters := Masters(model.bfloat16_layer.weight)),
    }
    objects["of_masters"] = torch.optim.SGD(masters.copies)
    with dq.Checkpointer(tmp_path, model, optimizer, extras=objects, quality="lossless") as ckpt:
        assert ckpt.restore() == step
        assert bits({name: model.state_dict()[name] for name in wanted["model"]}) == bits(dict(wanted["model"]))
        assert moments(model, optimizer) == dict(sorted(bits(dict(wanted["optimizer"]["state"]))[1]))
        assert ckpt.save(step + 1).result().parent == step
    assert bits({name: dq.load(tmp_path)["model"][name] for name in wanted["model"]}) == bits(dict(wanted["model"]))
