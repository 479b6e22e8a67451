"""Layouts of tensors: a lossless resume goes on bit for bit, whatever the order of the values in memory."""

import inspect

import pytest
import torch
from commands import call
from torch import Tensor, nn
from training import bits

import dynaquant as dq
from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten, unflatten

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)
HYPERPARAMETERS = {
    "Adam": {"amsgrad": True},
    "LBFGS": {"lr": 0.1, "max_iter": 2, "history_size": 3},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}


def implementations(name: str) -> list[dict[str, bool]]:
    """Return the arguments for each implementation of an optimizer that runs here."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    return [{}, *({argument: True} for argument in ("foreach", "fused") if argument in known)]


def contiguous(model: nn.Module) -> None:
    del model


def transposed(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


LAYOUTS = [contiguous, transposed, channels_last]
CASES = [
    (name, arguments, layout)
    for name in OPTIMIZERS
    for arguments in implementations(name)
    for layout in LAYOUTS
    if name != "LBFGS" or layout is contiguous  # it views gradients as vectors, so PyTorch refuses others
]


def training(name, arguments, layout):
    torch.manual_seed(0)
    if name == "Muon":  # it takes matrices only
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 6, bias=False), nn.Linear(6, 5, bias=False))
    else:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
    layout(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **HYPERPARAMETERS.get(name, {}), **arguments)
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(6, 3, 4, 4, generator=generator)
        classes = torch.randint(0, 5, (6,), generator=generator)

        def loss(images=images, classes=classes):
            optimizer.zero_grad()
            result = nn.functional.cross_entropy(model(images), classes)
            result.backward()
            return result

        optimizer.step(loss)


def strides(value):
    """Return the strides of all tensors in a state."""
    if isinstance(value, Tensor):
        return value.stride()
    if isinstance(value, dict):
        return {key: strides(inner) for key, inner in value.items()}
    return [strides(inner) for inner in value] if isinstance(value, list | tuple) else None


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert bits(a.state_dict()) == bits(b.state_dict())
        assert strides(a.state_dict()) == strides(b.state_dict())


@pytest.mark.parametrize(
    ("name", "arguments", "layout"), CASES, ids=[" ".join([n, *a, layout.__name__]) for n, a, layout in CASES]
)
def test_a_lossless_resume_goes_on_bit_for_bit(tmp_path, name, arguments, layout):
    whole = training(name, arguments, layout)
    train(*whole, range(3))
    with dq.Checkpointer(tmp_path, *whole, quality="lossless") as ckpt:
        ckpt.save(3)
    train(*whole, range(3, 9))

    resumed = training(name, arguments, layout)
    with dq.Checkpointer(tmp_path, *resumed, quality="lossless") as ckpt:
        ckpt.restore()
    train(*resumed, range(3, 9))
    assert_same(resumed, whole)

    with dq.Checkpointer(tmp_path, *resumed, quality="lossless") as ckpt:  # into an optimizer that has a state
        ckpt.restore()
    train(*resumed, range(3, 9))
    assert_same(resumed, whole)


@pytest.mark.parametrize("layout", [contiguous, transposed])
def test_a_lossless_resume_with_sparse_gradients_goes_on_bit_for_bit(tmp_path, layout):
    def training():
        torch.manual_seed(0)
        model = nn.Embedding(9, 4, sparse=True)
        layout(model)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            model(torch.tensor([step, 2 * step])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, resumed = training(), training()
    train(*whole, range(2))
    with dq.Checkpointer(tmp_path, *whole, quality="lossless") as ckpt:
        ckpt.save(2)
    train(*whole, range(2, 5))
    with dq.Checkpointer(tmp_path, *resumed, quality="lossless") as ckpt:
        ckpt.restore()
    train(*resumed, range(2, 5))
    assert_same(resumed, whole)


@pytest.mark.parametrize("present", [False, True], ids=["new state", "present state"])
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_moments_get_the_layout_that_their_parameter_has_now(tmp_path, before, after, quality, present):
    saved = training("Adam", {"fused": True}, before)
    with dq.Checkpointer(tmp_path, *saved, quality=quality) as ckpt:
        train(*saved, range(3))
        ckpt.save(3)
    model, optimizer = training("Adam", {"fused": True}, after)
    if present:  # moments of another layout than their parameters, as a restore by another program leaves them
        train(model, optimizer, range(3, 5))
        for state in optimizer.state.values():
            state.update({key: value.contiguous() for key, value in state.items()})
    with dq.Checkpointer(tmp_path, model, optimizer, quality=quality) as ckpt:
        ckpt.restore()
    stored = dq.load(tmp_path)["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            restored = optimizer.state[parameter][key]
            assert restored.stride() == parameter.stride()
            assert torch.equal(restored, stored[f"model.{name}"][key])


def test_other_tensors_get_the_layout_that_they_had(tmp_path):
    vectors = torch.linalg.qr(torch.randn(5, 3))[0]
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {"vectors": vectors, "images": images, "array": vectors.numpy().copy(order="F"), "plain": torch.ones(2, 2)}
    assert not vectors.is_contiguous()
    dq.save(state, tmp_path / "state.dqc", quality="lossless")
    loaded = dq.load(tmp_path / "state.dqc")
    assert bits(loaded) == bits(state)
    assert strides(loaded) == strides(state)
    assert loaded["array"].strides == state["array"].strides


@pytest.mark.parametrize(
    "view",
    [torch.randn(4, 6)[:, ::2], torch.randn(6, 4).T[:, ::2], torch.randn(1).expand(3, 4)],
    ids=["gaps", "gaps in a transpose", "shared memory"],
)
def test_a_view_that_is_not_dense_is_restored_in_the_layout_of_its_copies(view):
    tree, tensors = flatten({"view": view})
    # The stored values come back in C order, whatever the layout was.
    again = unflatten(
        tree, {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )
    assert torch.equal(again["view"], view)
    assert again["view"].stride() == torch.empty_like(view).stride()


def test_a_record_notes_state_that_has_gaps(tmp_path):
    model, optimizer = training("Adam", {}, contiguous)
    train(model, optimizer, range(1))
    weight = model[0].weight
    packed = torch.zeros(*weight.shape, 2)
    optimizer.state[weight]["exp_avg"] = packed[..., 0]
    extras = {"shared": {"ones": torch.ones(1).expand(3), "transposed": torch.ones(2, 3).T}}
    with dq.Checkpointer(tmp_path, model, optimizer, extras=extras, quality="lossless") as ckpt:
        (note,) = ckpt.save(1).result().notes
    assert note.startswith("optimizer.state.model.0.weight.exp_avg and 1 other tensors have gaps in memory")


@pytest.mark.parametrize(
    "wrong", [[1], [1, 4, 1], [1, 2], [2**62, 1], [-1, 3], [0, 0], ["1", 3], [1.0, 3], [True, 3], "13", None, {"1": 3}]
)
def test_strides_that_no_dense_tensor_has_are_refused(wrong):
    tree = {"dict": [["x", {"tensor": "x", "strides": wrong}]]}
    with pytest.raises(StateError, match="broken"):
        unflatten(tree, {"x": torch.randn(3, 4)})


def test_a_layout_survives_a_files_way_through_other_programs(tmp_path):
    model, optimizer = training("Adam", {"fused": True}, transposed)
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    call("compress", tmp_path / "state.pt", "-o", tmp_path / "state.dqc", "--quality", "lossless")
    call("decompress", tmp_path / "state.dqc", "-o", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt")
    assert strides(again) == strides(state)
