"""Values of every kind in an optimizer's state come back as they were, whatever ``Optimizer.load_state_dict`` makes of
them."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from training import bits

import dynaquant as dq

ONES = torch.ones(2, dtype=torch.float64)
LEAVES = {
    "text": "late",
    "no text": "",
    "bytes": b"ab\x00",
    "array": np.arange(3.0),
    "array of integers": np.arange(3),
    "array without dimensions": np.array(2.5),
    "empty array": np.zeros((0, 3)),
    "array in Fortran's order": np.asfortranarray(np.eye(3, 2)),
    "NumPy scalar": np.float32(1.5),
    "flag": True,
    "nothing": None,
    "large integer": 2**80,
    "not a number": float("nan"),
    "complex number": 1 + 2j,
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "set": {"a"},
    "frozenset": frozenset(["x"]),
    "counter": Counter("aab"),
    "ordered dictionary": OrderedDict(a=1, b="text"),
    "tuple": ("a", np.ones(2), (ONES,)),
    "list": ["a", [np.ones(1), {"key": "value"}], {}, []],
    "dictionary": {"text": "x", "ordered": OrderedDict(z=torch.ones(1, dtype=torch.int64))},
    "integers": torch.arange(3),
    "flags": torch.tensor([True]),
    "parameter": nn.Parameter(torch.ones(2)),
    "tensor with gradient": torch.ones(2, requires_grad=True),
}
WHOLE = {"text": "late", "ordered dictionary": OrderedDict(a="x", b=ONES), "list": [ONES, "x"], "array": np.arange(2)}
"""States of a parameter that are not dictionaries."""
STATES = {**{f"{name} in a dictionary": {"leaf": leaf, "count": 1} for name, leaf in LEAVES.items()}, **WHOLE}


class Plain(torch.optim.SGD):
    pass


class WithItsOwnLoad(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.loaded = True


def training(kind):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, kind(model.parameters(), 0.1)


@pytest.mark.parametrize("kind", [Plain, WithItsOwnLoad])
@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_parameter_comes_back(tmp_path, kind, name):
    model, optimizer = training(kind)
    optimizer.state[model.weight] = STATES[name]
    optimizer.state["of no parameter"] = {"leaf": "text", "array": np.ones(2)}
    expected = bits(list(optimizer.state.values()))
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1)
    model, optimizer = training(kind)
    for _ in range(2):  # into an optimizer without a state, and into one that has it
        with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
            ckpt.restore()
        assert bits(list(optimizer.state.values())) == expected


@pytest.mark.parametrize("name", LEAVES)
def test_a_hyperparameter_comes_back(tmp_path, name):
    model, optimizer = training(Plain)
    optimizer.param_groups[0]["leaf"] = LEAVES[name]
    expected = bits(optimizer.param_groups[0]["leaf"])
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1)
    model, optimizer = training(Plain)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.restore()
        assert bits(optimizer.param_groups[0]["leaf"]) == expected
        ckpt.restore()
    assert bits(optimizer.param_groups[0]["leaf"]) == expected


def test_a_divided_group_takes_an_array_on_which_the_groups_agree(tmp_path):
    model, optimizer = training(Plain)
    optimizer.param_groups[0]["bounds"] = np.array([1.0, 2.0])
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1)
    model, _ = training(Plain)
    groups = [{"params": [p], "bounds": np.zeros(2)} for p in model.parameters()]
    optimizer = Plain(groups, 0.1)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.restore()
    assert [group["bounds"].tolist() for group in optimizer.param_groups] == [[1.0, 2.0]] * 2
