"""Collects the state of objects and random number generators, and restores it."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from training import bits

import dynaquant as dq
from dynaquant.errors import StateError
from dynaquant.restore.fitting import fit_state, raise_if_any
from dynaquant.restore.restorer import load_objects
from dynaquant.state.flatten import flatten
from dynaquant.training import rng, supported
from dynaquant.training.collect import collect, collect_to_compare, rank_rng_state, stored_rng_state
from dynaquant.training.packed import joined, packed


def draws():
    return random.random(), np.random.rand(), float(torch.rand(())), random.gauss(0, 1), np.random.randn()


def test_the_global_generators_continue_from_a_restored_state():
    random.gauss(0, 1)  # the generator keeps a second value for the next call
    np.random.randn()
    state = rng.get_state()
    expected = draws()
    assert draws() != expected
    rng.set_state(state)
    assert draws() == expected


def test_the_state_of_pythons_generator_may_be_a_tuple():
    """Checkpoints of earlier versions hold it in that form."""
    state = rng.get_state() | {"python": random.getstate()}
    expected = draws()
    rng.set_state(state)
    assert draws() == expected


def test_a_state_is_not_changed_by_later_draws():
    state = rng.get_state()
    first = draws()
    for _ in range(3):
        rng.set_state(state)
        assert draws() == first


def test_states_of_missing_cuda_devices_are_ignored():
    state = rng.get_state()
    expected = draws()
    missing = torch.zeros(16, dtype=torch.uint8)
    rng.set_state(state | {"cuda": [*state["cuda"], missing]})
    assert draws() == expected


def fit_of(given, state, rank=0):
    return fit_state(given, collect_to_compare(given), state, rank)


def check_fit(given, state, what):
    raise_if_any(fit_of(given, state).problems, what, "")


def restore(given, state, rank=0):
    states = fit_of(given, state, rank).states
    stored = {name: thing for name, thing in given.items() if name in states}
    load_objects(stored, states, [], stored_rng_state(state, rank))


def training(width=4):
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": optim.lr_scheduler.StepLR(optimizer, 3),
        "generator": torch.Generator(),
        "numpy": np.random.Generator(np.random.Philox(5)),
    }


def advance(things):
    """Take a training step that uses all objects. Returns the loss and the learning rate."""
    noise = torch.rand(8, 3, generator=things["generator"]) + float(things["numpy"].normal()) + torch.rand(())
    loss = things["model"](noise).square().mean()
    things["optimizer"].zero_grad()
    loss.backward()
    things["optimizer"].step()
    things["scheduler"].step()
    return loss.item(), things["optimizer"].param_groups[0]["lr"]


def test_training_continues_from_a_collected_state():
    things = training()
    for _ in range(4):
        advance(things)
    supported.check(things)
    state = copy.deepcopy(collect(things))
    expected = [advance(things) for _ in range(4)]
    fresh = training()
    check_fit(fresh, state, "the checkpoint")
    restore(fresh, state)
    assert [advance(fresh) for _ in range(4)] == expected


class Loaded(optim.SGD):
    """Counts how often it was loaded. Its ``load_state_dict`` calls PyTorch's, which casts."""

    loads = 0

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loads += 1


class Packed(optim.SGD):
    """Saves its moments in half precision, and relies on PyTorch to cast them to the dtype of its parameters."""

    def state_dict(self):
        state = super().state_dict()
        halves = {index: {key: value.half() for key, value in of.items()} for index, of in state["state"].items()}
        return state | {"state": halves}


def bfloat16_parameters():
    """Return two groups, with parameters in another order than in the module."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).bfloat16()
    return [{"params": [model[1].bias, model[0].weight]}, {"params": [model[1].weight]}]


def unlike_its_parameter(parameter):
    """Return a state that PyTorch would cast on loading."""
    average = torch.randn(parameter.shape)
    return {
        "average": average,
        "the same": average,
        "half": torch.randn(2).half(),
        "codes": torch.randint(0, 256, (parameter.numel(),), dtype=torch.uint8),
        "steps": torch.tensor(1 << 40),
        "nested": {
            "list": [torch.rand(2), 3, (torch.rand(3, dtype=torch.float64), None)],
            "own": parameter.detach().clone(),
        },
    }


@pytest.mark.parametrize("name", ["optimizer", "another"])
@pytest.mark.parametrize("kind", [optim.SGD, Loaded])
def test_an_optimizers_state_keeps_its_dtypes_whatever_the_dtypes_of_its_parameters(name, kind):
    optimizer, fresh = (kind(bfloat16_parameters(), lr=0.1) for _ in range(2))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = unlike_its_parameter(parameter)
    optimizer.state["global"] = {"scale": torch.ones(2)}
    state = copy.deepcopy(collect({name: optimizer}))
    restore({name: fresh}, state)
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    for group, group_before in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        for parameter, parameter_before in zip(group["params"], group_before["params"], strict=True):
            assert bits(fresh.state[parameter]) == bits(optimizer.state[parameter_before])
            assert fresh.state[parameter]["average"] is fresh.state[parameter]["the same"]
    assert getattr(fresh, "loads", 1) == 1


def test_an_optimizers_own_conversions_are_not_undone():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Packed([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    state = copy.deepcopy(collect({"optimizer": optimizer}))
    assert state["optimizer"]["state"][0]["momentum_buffer"].dtype == torch.float16
    restore({"optimizer": optimizer}, state)
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32
    optimizer.step()


def of_rank(rank):
    """Return the objects of one rank of a data-parallel training, with generator states of its own."""
    things = training()
    for _ in range(rank + 1):
        torch.rand(2, generator=things["generator"])
        things["numpy"].normal()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    return things


def own_draws(things):
    return draws(), float(torch.rand((), generator=things["generator"])), float(things["numpy"].normal())


def randomness_of_ranks(*ranks):
    return joined([packed(rank_rng_state(of_rank(rank))) for rank in ranks])


def test_every_rank_restores_its_own_generators_and_the_rest_from_rank_0():
    others = randomness_of_ranks(1, 2)
    first = of_rank(0)
    advance(first)
    state = copy.deepcopy(collect(first, others))
    weights = state["model"]["0.weight"]
    expected = [own_draws(first)] + [own_draws(of_rank(rank)) for rank in (1, 2)]
    for rank in (0, 1, 2):
        fresh = training()
        check_fit(fresh, state, "the checkpoint")
        restore(fresh, state, rank)
        assert own_draws(fresh) == expected[rank]
        assert torch.equal(fresh["model"][0].weight, weights)
        assert fresh["scheduler"].last_epoch == 1
    assert len(set(expected)) == 3


def test_a_rank_that_was_not_saved_keeps_its_generators():
    others = randomness_of_ranks(1)
    state = copy.deepcopy(collect(of_rank(0), others))
    expected = own_draws(of_rank(2))
    later = of_rank(2)
    restore(later, state, 2)
    assert own_draws(later) == expected
    assert torch.equal(later["model"][0].weight, state["model"]["0.weight"])


def test_a_single_process_restores_a_checkpoint_of_many_ranks_like_one_of_its_own():
    others = randomness_of_ranks(1)
    many = copy.deepcopy(collect(of_rank(0), others))
    one = copy.deepcopy(collect(of_rank(0)))
    expected = own_draws(of_rank(0))
    for state in (many, one):
        fresh = of_rank(4)
        restore(fresh, state)
        assert own_draws(fresh) == expected


def test_generators_of_ranks_are_read_from_a_list_as_early_versions_stored_them():
    state = collect(of_rank(0))
    state["rng"]["ranks"] = [copy.deepcopy(rank_rng_state(of_rank(rank))) for rank in (1, 2)]
    expected = own_draws(of_rank(2))
    fresh = training()
    restore(fresh, state, 2)
    assert own_draws(fresh) == expected
    assert stored_rng_state(state, 3) is None


def test_the_generators_of_a_thousand_ranks_take_one_tensor_of_a_state():
    tree, tensors = flatten(collect(of_rank(0), joined([packed(rank_rng_state(of_rank(1)))] * 1000)))
    assert len([name for name in tensors if name.startswith("rng.ranks")]) == 1
    assert len(json.dumps(tree)) < 10_000
    assert len(tensors["rng.ranks"]) < 1000 * 17_000


def test_damaged_generators_of_ranks_are_an_error():
    ranks = randomness_of_ranks(1, 2)
    state = collect(of_rank(0), ranks[:-1])
    assert stored_rng_state(state, 1) is not None
    with pytest.raises(ValueError, match="end too early"):
        stored_rng_state(state, 2)


@pytest.mark.parametrize("thing", [object(), lambda: None, random.Random(1)])
def test_an_object_without_a_state_is_an_error_that_names_it(thing):
    with pytest.raises(StateError, match=f"^loader: {type(thing).__qualname__} has no state_dict"):
        supported.check({"model": nn.Linear(1, 1), "loader": thing})


def test_a_state_that_fits_is_accepted():
    things = training()
    check_fit(training(), collect(things), "step 5")


def problems(given, state):
    with pytest.raises(StateError, match=r"^step 5 does not fit the objects to restore:\n") as error:
        check_fit(given, state, "step 5")
    return str(error.value)


def test_missing_and_new_objects_are_listed():
    state = collect(training())
    given = training()
    given["ema"] = given.pop("numpy")
    text = problems(given, state)
    assert "the checkpoint has no extra 'ema'" in text
    assert "the checkpoint has an extra 'numpy', which was not given" in text
    assert "Nothing was changed" in text


def test_a_changed_architecture_is_listed_tensor_by_tensor():
    state = collect(training())
    given = training(width=6)
    given["model"].append(nn.Linear(6, 2))
    del given["model"][1]
    text = problems(given, state)
    assert "model.0.weight was float32[4, 3] and is float32[6, 3]" in text
    assert "model.1.running_mean is in the checkpoint, but not in the model" in text
    assert "model.1.weight was float32[4] and is float32[2, 6]" in text


def test_a_changed_dtype_is_listed():
    state = collect(training())
    given = training()
    given["model"].to(torch.bfloat16)
    assert "model.0.bias was float32[4] and is bfloat16[4]" in problems(given, state)


def test_a_long_list_of_differences_is_shortened():
    wide = {"model": nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))}
    text = problems({"model": nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)))}, collect(wide))
    assert "… and 8 more" in text
    assert text.count("float32") == 20


def test_another_optimizer_is_refused():
    things = training()
    state = collect(things)
    things["optimizer"] = optim.AdamW(things["model"].parameters())
    assert "optimizer was torch.optim.sgd.SGD and is torch.optim.adamw.AdamW" in problems(things, state)


class Unprepared(DataLoader):
    """Like a loader that Accelerate prepared without ``use_stateful_dataloader``."""

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        raise NotImplementedError


class NotReady:
    def state_dict(self):
        raise RuntimeError("call begin() first")

    load_state_dict = state_dict


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (DataLoader([1]), r"batches: DataLoader has no state_dict\(\) .*; give a loader that saves its position"),
        (
            Unprepared([1]),
            r"batches: state_dict\(\) of Unprepared failed \(AttributeError: .*dl_state_dict.*\); give a loader that "
            r".*use_stateful_dataloader=True",
        ),
        (
            NotReady(),
            r"batches: state_dict\(\) of NotReady failed \(RuntimeError: call begin\(\) first\); prepare it before",
        ),
    ],
    ids=["plain loader", "unprepared loader", "another"],
)
def test_an_extra_whose_state_dict_fails_is_refused_by_the_constructor(tmp_path, extra, said):
    with pytest.raises(StateError, match=said):
        dq.Checkpointer(tmp_path / "run", nn.Linear(2, 2), extras={"batches": extra})
    with dq.Checkpointer(tmp_path / "run", nn.Linear(2, 2)) as ckpt:  # the run is not locked
        ckpt.save(1).result()
