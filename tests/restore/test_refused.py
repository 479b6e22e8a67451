"""A restore that raises leaves all objects unchanged: they are checked before they change, or put back."""

import pytest
import torch
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.engine.label import Label
from dynaquant.state.flatten import flatten
from dynaquant.store.commit import WritableRun
from dynaquant.store.writing import Checkpoint
from dynaquant.training.collect import collect


def training(seed=0):
    torch.manual_seed(seed)
    model = model_of()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "order": torch.Generator()}


def crafted(folder, change) -> None:
    """Make a run with a checkpoint whose file is valid, but whose state was changed."""
    things = training()
    train(things["model"], things["optimizer"], 2)
    state = collect(things)
    change(state)
    tree, tensors = flatten(state)
    run = WritableRun(folder)
    with run.locked():
        run.commit(Checkpoint(1, tree, tensors, {name: Label("exact") for name in tensors}), None)


def assert_refused(folder, things, error, match) -> None:
    before = bits(collect(things))
    extras = {name: thing for name, thing in things.items() if name not in ("model", "optimizer")}
    with (
        dq.Checkpointer(folder, things["model"], things.get("optimizer"), extras=extras) as ckpt,
        pytest.raises(error, match=match),
    ):
        ckpt.restore()
    assert bits(collect(things)) == before


def first(state) -> dict:
    return state["optimizer"]["state"]["model.0.weight"]


def set_in(part, **values):
    return lambda state: part(state).update(values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_in(lambda s: s["optimizer"], state=[1, 2]), "holds no state of a training"),
        (set_in(lambda s: s["optimizer"], param_groups={}), "holds no state of a training"),
        (set_in(lambda s: s["optimizer"]["param_groups"][0], params=3), "holds no state of a training"),
        (set_in(lambda s: s["optimizer"]["param_groups"][0], params=["a"]), "holds no state of a training"),
        (set_in(lambda s: s, optimizer=7), "holds no state of a training"),
        (set_in(lambda s: s, model=[torch.ones(2)]), "holds no state of a training"),
        (set_in(lambda s: s, parameters={"optimizer": [[1]]}), "holds no state of a training"),
        (set_in(lambda s: s, order=torch.zeros(3, dtype=torch.uint8)), "order cannot take the state of the generator"),
        (set_in(lambda s: s["optimizer"]["state"], **{"model.0.weight": 1}), "model.0.weight is a int"),
        (
            set_in(first, exp_avg=torch.ones(3)),
            r"model\.0\.weight\.exp_avg is \[3\] in the checkpoint, but must be \[40, 24\]",
        ),
        (set_in(first, exp_avg="x"), r"exp_avg is a str, not a tensor of \[40, 24\]"),
        (
            set_in(first, exp_avg=torch.ones(40, 24, dtype=torch.int64)),
            "exp_avg is torch.int64 in the checkpoint, but must be floating point",
        ),
        (set_in(first, step=torch.ones(2)), r"step is \[2\] in the checkpoint, but must be \[\]"),
        (
            set_in(lambda s: s["optimizer"]["param_groups"][0], lr="fast"),
            "optimizer has lr=0.01, and the checkpoint has lr='fast'",
        ),
        (set_in(lambda s: s["optimizer"]["param_groups"][0], betas=(0.9,)), "and the checkpoint has betas="),
    ],
)
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "in training"])
def test_a_malformed_state_is_refused_and_nothing_is_changed(tmp_path, change, match, steps):
    crafted(tmp_path, change)
    things = training(1)
    train(things["model"], things["optimizer"], steps)
    assert_refused(tmp_path, things, dq.DynaquantError, match)


def test_malformed_metadata_is_refused(tmp_path):
    def change(state):
        state["model"]._metadata = 5

    crafted(tmp_path, change)
    assert_refused(tmp_path, training(1), dq.CheckpointError, "holds no state of a training")


def test_a_parameter_group_keeps_hyperparameters_that_the_checkpoint_lacks(tmp_path):
    crafted(tmp_path, lambda state: state["optimizer"]["param_groups"][0].pop("eps"))
    things = training(1)
    with dq.Checkpointer(tmp_path, things["model"], things["optimizer"], extras={"order": things["order"]}) as ckpt:
        ckpt.restore()
    train(things["model"], things["optimizer"])
    assert things["optimizer"].param_groups[0]["eps"] == 1e-8


class WithHistory(torch.optim.SGD):
    """An optimizer outside ``torch.optim``, with one state that grows and one that does not."""

    @torch.no_grad()
    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            norms = state.get("norms", torch.empty(0))
            state["norms"] = torch.cat([norms, parameter.norm()[None]])
            state["slow"] = parameter.clone()


def test_unknown_optimizer_state_must_have_the_parameters_shape_only_if_it_has_it_now(tmp_path):
    def things(seed):
        torch.manual_seed(seed)
        model = model_of()
        return {"model": model, "optimizer": WithHistory(model.parameters(), lr=0.1)}

    saved = things(0)
    with dq.Checkpointer(tmp_path, *saved.values(), quality="lossless") as ckpt:
        train(saved["model"], saved["optimizer"], 3)
        ckpt.save(1).result()
        train(saved["model"], saved["optimizer"], 2)
        ckpt.restore()
    first = saved["model"][0].weight
    assert saved["optimizer"].state[first]["norms"].shape == (3,)
    saved["optimizer"].state[first]["slow"] = torch.ones(2)
    with dq.Checkpointer(tmp_path, *saved.values(), quality="lossless") as ckpt:
        ckpt.save(2)
    other = things(1)
    train(other["model"], other["optimizer"])
    assert_refused(
        tmp_path, other, dq.StateError, r"model\.0\.weight\.slow is \[2\] in the checkpoint, but must be \[40, 24\]"
    )


class WithMask(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.layer = nn.Linear(3, 3)


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_an_expanded_buffer_is_restored(tmp_path, value):
    model = WithMask(torch.full((4, 1), value).expand(4, 5))
    with dq.Checkpointer(tmp_path, model, quality="lossless") as ckpt:
        ckpt.save(1).result()
    other = WithMask(torch.zeros(4, 1).expand(4, 5))
    with dq.Checkpointer(tmp_path, other) as ckpt:
        assert ckpt.restore() == 1
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert other.mask.stride() == (1, 0)
    another = WithMask(torch.zeros(4, 1).expand(4, 5))
    dq.load_into(another, tmp_path)
    assert bits(another.state_dict()) == bits(model.state_dict())


def test_an_expanded_buffer_that_cannot_hold_the_stored_values_is_refused(tmp_path):
    with dq.Checkpointer(tmp_path, WithMask(torch.arange(6.0).reshape(2, 3)), quality="lossless") as ckpt:
        ckpt.save(1).result()
    other = WithMask(torch.zeros(1, 3).expand(2, 3))
    assert_refused(tmp_path, {"model": other}, dq.StateError, "model.mask has elements that share memory")
    with pytest.raises(dq.StateError, match="elements that share memory"):
        dq.load_into(other, tmp_path)


class Position:
    """A user's loader. It may raise an error after it has loaded a part of its state."""

    def __init__(self, position=0, fails=False):
        self.position, self.fails = position, fails

    def state_dict(self):
        return {"position": self.position, "seen": torch.full((3,), float(self.position))}

    def load_state_dict(self, state):
        self.position = state["position"]
        if self.fails:
            self.fails = False
            raise RuntimeError("no")


def test_a_failing_extra_is_put_back_with_all_extras_before_it(tmp_path):
    def objects(position, seed, fails=False):
        things = training(seed)
        things["order"].manual_seed(seed)
        others = {"first": Position(position), "average": model_of(), "progress": {"epoch": position, "losses": [1.0]}}
        scheduler = torch.optim.lr_scheduler.StepLR(things["optimizer"], 1 + position)
        return {**things, **others, "scheduler": scheduler, "last": Position(position, fails)}

    things = objects(3, 1)
    extras = {name: thing for name, thing in things.items() if name not in ("model", "optimizer")}
    with dq.Checkpointer(tmp_path, things["model"], things["optimizer"], extras=extras) as ckpt:
        train(things["model"], things["optimizer"])
        ckpt.save(1)
    things = objects(5, 2, fails=True)
    losses = things["progress"]["losses"]
    assert_refused(tmp_path, things, RuntimeError, "^no$")
    assert things["progress"]["losses"] is losses
    extras = {name: thing for name, thing in things.items() if name not in ("model", "optimizer")}
    with dq.Checkpointer(tmp_path, things["model"], things["optimizer"], extras=extras) as ckpt:
        assert ckpt.restore() == 1  # it fails once only
    assert (things["last"].position, things["progress"]["epoch"], things["scheduler"].step_size) == (3, 3, 4)
