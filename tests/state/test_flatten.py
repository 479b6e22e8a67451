"""States that can be stored survive a round trip unchanged. Any other value is an error that names its path."""

import contextlib
import enum
import json
import math
import re
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiers import examples
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils

from dynaquant.engine.tensors.dtypes import DTYPES, dtype_name
from dynaquant.engine.tensors.element_types import ITEM_SIZES
from dynaquant.errors import StateError
from dynaquant.state.flatten import flatten, unflatten
from dynaquant.training import rng


def nested_of(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls the feature a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def round_trip(state):
    """Flatten a state, write and read the tree as JSON, copy the tensors, and unflatten."""
    tree, tensors = flatten(state)
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="surrogatepass")
    copies = {
        name: bytes_of(tensor).clone().view(tensor.dtype).reshape(tensor.shape) for name, tensor in tensors.items()
    }
    return unflatten(json.loads(text.decode("utf-8", errors="surrogatepass")), copies)


def bytes_of(tensor):
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # works for the strides of an empty array, too


def same(a, b):
    """Whether two states are identical in structure, type and value, down to the sign of a zero. All NaNs are equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        kind = (a.dtype, a.shape, a.requires_grad)
        return kind == (b.dtype, b.shape, b.requires_grad) and torch.equal(bytes_of(a), bytes_of(b))
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        metadata = getattr(a, "_metadata", None), getattr(b, "_metadata", None)
        return len(a) == len(b) and all(map(same, a.items(), b.items())) and same(*metadata)
    if isinstance(a, set | frozenset):
        # Sets have no order to compare: even the repr of a nested frozenset depends on the process's hash seed.
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


# -- All kinds of values ------------------------------------------------------------------------------------------

any_text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
huge = st.integers(-(2**500), 2**500)
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64]))
    tensor = torch.tensor(draw(st.integers(-1000, 1000))) * torch.ones(draw(shapes), dtype=dtype)
    differentiable = dtype.is_floating_point and draw(st.booleans())
    if draw(st.booleans()):
        return nn.Parameter(tensor, requires_grad=differentiable)
    return tensor.requires_grad_(differentiable)


numbers = st.sampled_from([name for name in DTYPES if name in np.sctypeDict])
any_array = numbers.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)))
any_scalar = numbers.flatmap(lambda dtype: hnp.arrays(dtype, 1)).map(lambda array: array[0])
any_dtype = st.sampled_from(list(DTYPES.values()))
any_device = st.sampled_from(["cpu", "cuda", "cuda:3", "mps", "meta"]).map(torch.device)

any_state = st.recursive(
    hashable
    | huge
    | st.complex_numbers()
    | shapes.map(torch.Size)
    | any_dtype
    | any_device
    | any_tensor()
    | any_array
    | any_scalar,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


@given(any_state)
def test_every_state_that_can_be_stored_survives_a_round_trip(state):
    assert same(round_trip(state), state)


@given(any_state)
def test_flatten_does_not_change_the_state(state):
    tree, tensors = flatten(state)
    again, tensors_again = flatten(state)
    assert same(tree, again)
    assert list(tensors) == list(tensors_again)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1),
        *(complex(-0.0, math.nan), complex(math.inf, -0.0)),
        *(2**63, -(2**64), 10**300, True, False, None),
        *("", "\ud800", "\ud83d\ude00", "\U0001f600", "\0", "ключ", 'a"b\\c', b"", b"\x00\xff"),
        *((), [], {}, set(), frozenset(), ((),), [[]], OrderedDict(), Counter(), torch.Size([]), torch.Size([3, 0])),
        {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple", b"1": "bytes", True - 1: "zero"},
        {"tensor": "not.a.tensor", "dict": [], "float": 1.0},
        [{"tuple": [1]}, {"bytes": "AA=="}],
        *(np.float32(1.5), np.float64(0.1), np.int64(-7), np.bool_(True), np.complex64(1 - 2j), np.longdouble("0.1")),
    ],
    ids=repr,
)
def test_plain_values_survive_a_round_trip(value):
    assert same(round_trip(value), value)
    assert same(round_trip({"key": [value]}), {"key": [value]})


@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")
@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_survive_a_round_trip(name):
    dtype = DTYPES[name]
    assert (dtype_name(dtype), dtype.itemsize) == (name, ITEM_SIZES[name])
    tensor = torch.arange(6 * dtype.itemsize).to(torch.uint8).view(dtype).reshape(2, 3)
    tensor = tensor if dtype != torch.bool else tensor.to(torch.uint8) > 2
    assert same(round_trip({"t": tensor}), {"t": tensor})


def test_every_dtype_of_torch_has_a_name_or_cannot_hold_plain_values():
    every = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    missing = {dtype_name(dtype) for dtype in every - set(DTYPES.values())}
    assert all(re.match(r"q|bits|u?int[1-7]$", name) for name in missing)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(10)[::-2],
        np.asfortranarray(np.eye(3)),
        np.array(3.5),
        np.zeros((0, 4), dtype=np.float16),
    ],
    ids=["transposed", "backwards", "Fortran", "zero-dimensional", "empty"],
)
def test_numpy_arrays_of_any_layout_survive_a_round_trip(array):
    assert same(round_trip({"a": array}), {"a": array})


def test_restored_numpy_arrays_are_writeable_and_share_no_memory():
    array = np.arange(4)
    back = round_trip([array, array])
    back[0][0] = 99
    assert array[0] == back[1][0] == 0


def test_numpy_arrays_of_foreign_byte_order_keep_their_values():
    assert round_trip(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]


def test_conjugated_and_negated_views_are_stored_by_value():
    z = torch.tensor([1 + 2j, -3j])
    for view in (z.conj(), z.conj().imag):
        assert torch.equal(round_trip([view])[0], view)


# -- Names and ties -----------------------------------------------------------------------------------------------


def test_tensors_are_named_by_their_paths():
    tensor = torch.ones(2)
    _, tensors = flatten({"model": {"a.b": tensor, "c": [tensor + 1, (tensor + 2,)]}, 7: {0: tensor + 3}})
    assert list(tensors) == ["model.a.b", "model.c.0", "model.c.1.0", "7.0"]


def test_flattened_tensors_share_the_memory_of_the_state():
    tensor = nn.Parameter(torch.ones(2))
    _, tensors = flatten([tensor])
    assert tensors["0"].data_ptr() == tensor.data_ptr()
    assert not tensors["0"].requires_grad


def test_paths_that_collide_get_different_names():
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "a.b~2": torch.tensor(3), 1: torch.tensor(4)}
    state["1"] = torch.tensor(5)
    assert same(round_trip(state), state)
    assert len(flatten(state)[1]) == 5


def test_tied_tensors_stay_tied():
    tensor, parameter = torch.randn(3), nn.Parameter(torch.randn(2))
    back = round_trip({"a": tensor, "b": [tensor, parameter], "c": parameter})
    assert back["a"] is back["b"][0]
    assert back["c"] is back["b"][1]
    assert len(flatten({"a": tensor, "b": [tensor]})[1]) == 1


def test_a_parameter_and_its_data_still_share_memory():
    parameter = nn.Parameter(torch.randn(2))
    for state in ([parameter, parameter.detach()], [parameter.detach(), parameter]):
        back = round_trip(state)
        assert same(back, state)
        assert back[0].data_ptr() == back[1].data_ptr()


def test_a_tensor_that_requires_gradients_and_its_detached_alias_stay_different():
    tensor = torch.ones(2, requires_grad=True)
    for state in ([tensor, tensor.detach()], [tensor.detach(), tensor]):
        back = round_trip(state)
        assert same(back, state)
        assert back[0].data_ptr() == back[1].data_ptr()


def test_a_tied_model_stays_tied():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    tree, tensors = flatten({"model": model.state_dict()})
    assert list(tensors) == ["model.0.weight"]
    back = unflatten(tree, tensors)["model"]
    assert back["0.weight"] is back["1.weight"]


def test_equal_or_empty_tensors_do_not_count_as_tied():
    back = round_trip([torch.ones(2), torch.ones(2), torch.zeros(0), torch.zeros(0)])
    assert len({id(tensor) for tensor in back}) == 4


# -- Real training states -----------------------------------------------------------------------------------------


def test_the_state_of_a_model_keeps_its_metadata():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2))
    back = round_trip(model.state_dict())
    assert same(back, model.state_dict())
    assert back._metadata["1"] == {"version": 2}
    model.load_state_dict(back)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))


OPTIMIZERS = {
    name: getattr(optim, name)
    for name in dir(optim)
    if isinstance(getattr(optim, name), type) and name not in ("Optimizer", "SparseAdam")
} | {
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop, centred, with momentum": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
    "Adam with amsgrad and a tensor for lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "fused AdamW": lambda p: optim.AdamW(p, fused=True),
    "AdamW with groups": lambda p: optim.AdamW([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]),
}


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).reshape(2, 6) / 12).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_identically_from_its_state(name):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = round_trip(state)
    assert same(back, state)

    other = net()
    resumed = OPTIMIZERS[name](other.parameters())
    other.load_state_dict(back["model"])
    resumed.load_state_dict(back["optimizer"])
    step(model, optimizer)
    step(other, resumed)
    assert same(list(other.state_dict().values()), list(model.state_dict().values()))


def test_the_state_of_sparse_adam_survives_a_round_trip():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "constant": lr_scheduler.ConstantLR,
    "linear": lr_scheduler.LinearLR,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lr_scheduler.PolynomialLR,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, mode="exp_range", gamma=0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "averaging": lambda o: swa_utils.SWALR(o, 0.05),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_continues_from_its_state(name):
    def advance(scheduler, optimizer, times):
        rates = []
        for _ in range(times):
            step(model, optimizer)
            scheduler.step(1.0) if name == "plateau" else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    advance(scheduler, optimizer, 3)
    back = round_trip([optimizer.state_dict(), scheduler.state_dict()])
    assert same(back, [optimizer.state_dict(), scheduler.state_dict()])

    other = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    resumed = SCHEDULERS[name](other)
    other.load_state_dict(back[0])
    resumed.load_state_dict(back[1])
    assert advance(resumed, other, 4) == advance(scheduler, optimizer, 4)


def test_gradient_scalers_averaged_models_and_random_generators_survive_a_round_trip():
    averaged = swa_utils.AveragedModel(net())
    averaged.update_parameters(net())
    for state in (torch.amp.GradScaler("cpu").state_dict(), averaged.state_dict(), rng.get_state()):
        assert same(round_trip(state), state)


# -- Values that cannot be stored ---------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED GREEN")


class Text(str):
    __slots__ = ()


class Custom:
    pass


def quantized_tensor():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda x: x, "builtins.function cannot be stored"),
        (Custom(), "test_flatten.Custom cannot be stored"),
        (Custom, "builtins.type cannot be stored"),
        (Point(1, 2), "test_flatten.Point cannot be stored"),
        (Colour.RED, "Colour cannot be stored"),
        (Text("a"), "test_flatten.Text cannot be stored"),
        (defaultdict(int), "collections.defaultdict cannot be stored"),
        (bytearray(b"a"), "builtins.bytearray cannot be stored"),
        (range(3), "builtins.range cannot be stored"),
        (torch.Generator(), "Generator cannot be stored"),
        (nested_of(torch.strided), "a nested tensor cannot be stored; store the tensors that it is made of"),
        (nested_of(torch.jagged), "a nested tensor cannot be stored; store the tensors that it is made of"),
        (nn.Parameter(nested_of(torch.strided)), "a nested tensor cannot be stored"),
        (torch.ones(2).to_sparse(), "sparse_coo tensor cannot be stored; make it dense first"),
        (torch.ones(2, device="meta"), "meta device has no values"),
        (nn.UninitializedParameter(), "UninitializedParameter cannot be stored"),
        (np.array(["a"]), "a NumPy array of <U1 has no tensor type"),
        (np.array([None]), "a NumPy array of object has no tensor type"),
        (np.array([1], dtype="M8[s]"), "has no tensor type"),
        (np.zeros(1, dtype=np.longdouble), "has no tensor type"),
        (np.ma.masked_array([1]), "MaskedArray cannot be stored"),
        (np.datetime64(1, "s"), "datetime64 cannot be stored"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_cannot_be_stored_is_an_error_that_names_its_path(value, what):
    for state, path in (
        ({"model": {"layers": [0, value]}}, r"model\.layers\.1"),
        ({"data": ({"x": value},)}, r"data\.0\.x"),
    ):
        with pytest.raises(StateError, match=rf"^{path}: .*{what}"):
            flatten(state)


class Subclass(Tensor):
    pass


def test_a_tensor_of_a_subclass_cannot_be_stored_and_the_error_says_what_to_do():
    message = (
        r"^optimizer\.state\.0\.exp_avg: a tensor of class .*test_flatten\.Subclass cannot be stored; wrap its owner"
    )
    with pytest.raises(StateError, match=message):
        flatten({"optimizer": {"state": {0: {"exp_avg": torch.ones(2).as_subclass(Subclass)}}}})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_tensors_cannot_be_stored():
    with pytest.raises(StateError, match=r"^model\.w: a tensor of qint8 cannot be stored"):
        flatten({"model": {"w": quantized_tensor()}})


def test_a_key_that_cannot_be_stored_is_an_error_that_names_its_path():
    with pytest.raises(StateError, match=r"^a\.b \(a key\): .*Colour cannot be stored"):
        flatten({"a": {"b": {Colour.RED: 1}}})


def test_a_state_that_contains_itself_is_an_error_that_names_its_path():
    inner = {"list": []}
    inner["list"].append(inner)
    with pytest.raises(StateError, match=r"^a\.list\.0: the state contains itself"):
        flatten({"a": inner})
    shared = [1]
    assert round_trip({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def nested(wrap, depth):
    state = 0
    for _ in range(depth):
        state = wrap(state)
    return state


WRAPS = pytest.mark.parametrize(
    "wrap", [lambda s: {"a": s}, lambda s: (s,), lambda s: [s]], ids=["dict", "tuple", "list"]
)


@WRAPS
def test_a_state_that_is_nested_too_deeply_is_refused(wrap):
    with pytest.raises(StateError, match="nested too deeply to store"):
        flatten(nested(wrap, 5000))


@WRAPS
def test_any_depth_that_can_be_stored_can_be_restored(wrap):
    for depth in range(1, 1000, 7):
        state = nested(wrap, depth)
        try:
            flatten(state)
        except StateError:
            continue
        assert repr(round_trip(state)) == repr(state)
    assert round_trip(nested(wrap, 50)) == nested(wrap, 50)


def test_an_integer_that_is_too_large_is_an_error_that_names_its_path():
    with pytest.raises(StateError, match=r"^a\.0: "):
        flatten({"a": [10**5000]})


@pytest.mark.parametrize(
    "tree",
    [
        *({}, {"unknown": 1}, {"tensor": "missing"}, {"tensor": ["x"]}, {"tensor": None}, {"parameter": 3}),
        *({"tuple": 5}, {"dict": [[1]]}, {"dict": [[[1], 2]]}, {"dict": 1}, {"set": [[1]]}, {"ordered_dict": "abc"}),
        *({"float": "one"}, {"float": []}, {"float": 10**400}, {"complex": ["a", "b"]}, {"complex": [1, 2, 3]}),
        *({"bytes": 5}, {"bytes": "A"}, {"bytes": "é"}, {"size": ["a"]}, {"size": [None]}, {"dtype": "float3"}),
        *({"scalar": "a"}, {"scalar": ["float32", ""]}, {"scalar": ["O", "AAAAAAAAAAA="]}, {"scalar": ["x", "AA=="]}),
        *({"device": "toaster"}, {"device": "cpu:-1"}, {"device": []}, {"device": 5}),
        *({"tuple": [], "metadata": 1}, {"dict": [], "metadata": 1}, {"ndarray": "half"}, {"ndarray": "missing"}),
        *({"parameter": "x", "requires_grad": True}, {"tensor": "x", "requires_grad": True}),
        [{"dict": [["a", {"tuple": [{"tensor": "missing"}]}]]}],
    ],
    ids=lambda tree: repr(tree)[:40],
)
def test_a_broken_tree_is_an_error(tree):
    tensors = {"x": torch.tensor([1, 2]), "half": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(StateError, match="stored tree of the state is broken"):
        unflatten(tree, tensors)


def test_a_tree_that_is_nested_too_deeply_is_an_error():
    tree = 0
    for _ in range(5000):
        tree = {"tuple": [tree]}
    with pytest.raises(StateError, match="stored tree of the state is broken"):
        unflatten(tree, {})


NODE_KINDS = [
    *("tensor", "parameter", "ndarray", "scalar", "float", "complex", "bytes", "dtype", "device", "dict"),
    *("ordered_dict", "counter", "tuple", "set", "frozenset", "size", "metadata", "requires_grad"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NODE_KINDS),
            inner | st.just("x"),
            max_size=2,
        )
    ),
    max_leaves=8,
)


@examples(500)
@given(json_values)
def test_any_json_gives_a_state_or_an_error(tree):
    with contextlib.suppress(StateError):
        unflatten(tree, {"x": torch.ones(2)})
