"""Values of every kind in an optimizer's state come back as they were, whatever ``Optimizer.load_state_dict`` makes of
them."""

from collections import Counter, OrderedDict, deque
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from commands import failed
from torch import nn
from training import bits

import dynaquant as dq
from dynaquant.state.plain_objects import PlainObject
from dynaquant.training.optimizers import fit


class Norm(IntEnum):
    SPECTRAL = 2


class Projector:
    """An object as optimizers keep them in their state, such as GaLore's."""

    class Side(Enum):
        LEFT = "l"

    def __init__(self):
        self.side, self.scale, self.inner = self.Side.LEFT, 0.5, [deque([1.5], maxlen=3)]
        self.basis = torch.eye(3, dtype=torch.float64).T[:, [1, 0, 2]]

    def __getattr__(self, name):
        raise AttributeError(name)


class Deeper:
    def __init__(self):
        self.projectors = {"a": Projector(), "b": [Projector()]}


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
    "complex numbers": torch.tensor([1 + 2j]),
    "as large as its parameter": torch.ones(2, 3, dtype=torch.float64),
    "queue": deque([ONES, "x"], maxlen=2),
    "queue without a limit": deque(),
    "member of an enumeration": Norm.SPECTRAL,
    "object": Projector(),
    "objects in objects": Deeper(),
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


def with_leaf(leaf, folder):
    """Save an optimizer with such a state."""
    model, optimizer = training(Plain)
    optimizer.state[model.weight] = {"leaf": leaf}
    with dq.Checkpointer(folder, model, optimizer, quality="lossless") as ckpt:
        ckpt.save(1)
    return model, optimizer


def refused_at_the_restore(folder, leaf, message):
    model, optimizer = with_leaf(leaf, folder)
    with (
        dq.Checkpointer(folder, model, optimizer, quality="lossless") as ckpt,
        pytest.raises(dq.StateError, match=message),
    ):
        ckpt.restore()


def test_a_loaded_state_tells_what_an_object_was(tmp_path):
    with_leaf(Projector(), tmp_path)
    (state,) = dq.load(tmp_path)["optimizer"]["state"].values()
    assert state["leaf"].kind.endswith(":Projector")
    assert torch.equal(state["leaf"].content["basis"], Projector().basis)


def test_objects_that_are_there_before_a_restore_stay_as_they_are(tmp_path):
    model, optimizer = with_leaf(Projector(), tmp_path)
    before = optimizer.state[model.weight]["leaf"]
    before.basis *= 2
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        ckpt.restore()
    after = optimizer.state[model.weight]["leaf"]
    assert after is not before
    assert torch.equal(after.basis * 2, before.basis)


class Slotted:
    __slots__ = ("value",)


class OfItsOwnMaking:
    def __reduce__(self):
        return OfItsOwnMaking, ()


def local_object():
    class Local:
        pass

    return Local()


DELETED = []


class Cleaner:
    def __del__(self):
        DELETED.append(vars(self))


class Holder:
    def __init__(self, content):
        self.content = content


REFUSED = [Slotted(), OfItsOwnMaking(), local_object(), Cleaner(), [Projector()] * 2, {"f": training}]
HOLDERS = [Holder([{"a": (nn.Parameter(torch.ones(2)),)}]), Holder(Holder({nn.Parameter(torch.ones(2))}))]


@pytest.mark.parametrize("leaf", [*REFUSED, *HOLDERS])
def test_an_object_that_would_not_come_back_is_refused_at_the_save(tmp_path, leaf):
    with pytest.raises(dq.StateError, match=r"optimizer.state.model.weight.leaf.*cannot be stored"):
        with_leaf(leaf, tmp_path)


def test_tensors_as_keys_are_refused_at_the_save(tmp_path):
    with pytest.raises(dq.StateError, match=r"state.model.weight.leaf: a dictionary with tensors as keys"):
        with_leaf({torch.ones(1): 1}, tmp_path)


@pytest.mark.parametrize("gone", [Projector, Norm])
def test_an_object_whose_class_is_gone_is_an_error_that_names_it(tmp_path, monkeypatch, gone):
    with_leaf(Norm.SPECTRAL if gone is Norm else Projector(), tmp_path)
    model, optimizer = training(Plain)
    monkeypatch.delitem(globals(), gone.__name__)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        with pytest.raises(dq.StateError, match=f"cannot take its state: it has an object .*:{gone.__name__}"):
            ckpt.restore()
        ckpt.restore(strict=False)


def test_a_class_of_another_package_is_not_looked_up(tmp_path):
    """A file cannot have an optimizer make objects of any class."""
    refused_at_the_restore(
        tmp_path, PlainObject("subprocess:Popen", {"pid": 1}), "subprocess:Popen, which cannot be found"
    )


class Part(nn.Module):
    pass


@pytest.mark.parametrize("kind", [Cleaner, Part, Plain, Slotted])
def test_no_object_is_made_of_a_class_with_code_of_its_own_for_that(tmp_path, kind):
    leaf = PlainObject(f"{__name__}:{kind.__qualname__}", {"path": "victim"})
    refused_at_the_restore(tmp_path, leaf, f":{kind.__qualname__}, which is more than its attributes")
    assert not any("path" in attributes for attributes in DELETED)


@pytest.mark.parametrize(
    "leaf", [PlainObject(f"{__name__}:Projector", {}), PlainObject(f"{__name__}:Norm", "SPECTRAL")]
)
def test_only_an_optimizer_gets_objects(tmp_path, leaf):
    extras = {"progress": {"inner": [leaf]}}
    with dq.Checkpointer(tmp_path, training(Plain)[0], extras=extras) as ckpt:
        ckpt.save(1)
        with pytest.raises(dq.StateError, match=r"progress has an object of .*, which only the state of an optimizer"):
            ckpt.restore()


def test_tensors_of_objects_are_on_the_device_of_their_parameter():
    parameters = [nn.Parameter(torch.ones(1, device=device)) for device in ("cpu", "meta")]
    slots = {"leaf": PlainObject(f"{__name__}:Holder", {"content": [torch.ones(2)]})}
    stored = {"state": {"a": slots, "b": slots}, "param_groups": [{"params": ["a", "b"]}]}
    fitted = fit("optimizer", Plain(parameters, 0.1), [["a", "b"]], stored, [["a", "b"]])
    assert [fitted.state["state"][number]["leaf"].content[0].device.type for number in (0, 1)] == ["cpu", "meta"]


def test_an_optimizer_may_keep_a_state_that_holds_itself(tmp_path):
    """One that a restore leaves alone, as the checkpoint is older than its parameter."""
    with_leaf(1, tmp_path)
    model, optimizer = training(Plain)
    optimizer.add_param_group({"params": [new := nn.Parameter(torch.ones(1))]})
    model.new = new
    leaf = Holder([])
    leaf.content.append(leaf)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        optimizer.state[new] = {"leaf": leaf}
        ckpt.restore(strict=False)
    assert optimizer.state[new]["leaf"].content[0] is optimizer.state[new]["leaf"]


def test_an_export_says_that_it_cannot_hold_an_object(tmp_path, monkeypatch, capsys):
    with_leaf(Projector(), tmp_path / "run")
    arguments = ("export", tmp_path / "run", "--to", "torch-state", "-o", tmp_path / "state.pt")
    failed(monkeypatch, capsys, "its optimizer keeps an object of the class", *arguments)
    assert not (tmp_path / "state.pt").exists()
