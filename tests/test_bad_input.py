"""Unusual weights and hostile states: they are restored exactly, or raise an error that names the problem."""

import math

import pytest
import torch
from crafted import entry, header, write
from hypothesis import given
from hypothesis import strategies as st
from rewritten import rewrite
from torch import Tensor, nn
from training import bits

import dynaquant as dq
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run

FIXED = dq.Configuration()
EITHER_QUANTIZER = pytest.mark.parametrize("fixed", [FIXED, dq.GridConfiguration(scale=-40)], ids=["published", "grid"])


def module_of(**weights: Tensor) -> nn.Module:
    module = nn.Module()
    for name, weight in weights.items():
        module.register_parameter(name, nn.Parameter(weight))
    return module


def round_trip(folder, module: nn.Module, **options) -> tuple[dict[str, Tensor], dq.Record]:
    """Save a module and restore into a copy. Returns the restored parameters and the record."""
    options = {"quality": dq.Quality(configuration=FIXED)} | options
    with dq.Checkpointer(folder, module, **options) as ckpt:
        record = ckpt.save(1).result()
    other = module_of(**{name: torch.zeros_like(p) for name, p in module.named_parameters()})
    with dq.Checkpointer(folder, other, **options) as ckpt:
        assert ckpt.restore() == 1
        assert ckpt.skipped == []
    return dict(other.named_parameters()), record


def grown(weight: Tensor, value: float) -> Tensor:
    weight[3, 4] = value
    return weight


NOT_QUANTIZED = {
    "constant": torch.full((20, 30), 0.3),
    "zeros": torch.zeros(20, 30),
    "negative zeros": -torch.zeros(20, 30),
    "one element": torch.tensor([[1 / 3]]),
    "empty": torch.zeros(0, 30),
    "empty of three dimensions": torch.zeros(3, 0, 2),
    "zero dimensions": torch.tensor(1 / 3),
    "double": torch.full((2, 3), 1 / 3, dtype=torch.float64),
}


@EITHER_QUANTIZER
@pytest.mark.parametrize("name", NOT_QUANTIZED)
def test_weights_that_cannot_be_quantized_are_restored_exactly(tmp_path, name, fixed):
    module = module_of(odd=NOT_QUANTIZED[name], plain=torch.randn(20, 30))
    restored, record = round_trip(tmp_path, module, quality=dq.Quality(configuration=fixed))
    assert bits(restored["odd"]) == bits(module.odd)
    assert bits(restored["plain"]) != bits(module.plain)
    assert record.notes == []


@EITHER_QUANTIZER
def test_weights_of_one_dimension_are_quantized_only_on_the_grid(tmp_path, fixed):
    module = module_of(odd=torch.randn(30), plain=torch.randn(20, 30))
    restored, record = round_trip(tmp_path, module, quality=dq.Quality(configuration=fixed))
    assert (bits(restored["odd"]) == bits(module.odd)) == (fixed == FIXED)
    assert bits(restored["plain"]) != bits(module.plain)
    assert record.notes == []


NOTES_ON_ODD = [
    "model.odd: 1 infinite or NaN values, stored exactly",
    "model.odd has infinite or NaN values: unless they are meant, training has diverged. The run has no checkpoint "
    "with finite weights",
]


@EITHER_QUANTIZER
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_with_infinite_or_nan_values_are_restored_exactly_and_noted(tmp_path, value, dtype, fixed):
    module = module_of(odd=grown(torch.randn(20, 30).to(dtype), value), plain=torch.randn(20, 30).to(dtype))
    restored, record = round_trip(tmp_path, module, quality=dq.Quality(configuration=fixed))
    assert bits(restored["odd"]) == bits(module.odd)
    assert record.notes == NOTES_ON_ODD


def sum_of(module) -> float:
    """A metric that feels all weights."""
    odd = float(module.odd.nan_to_num(posinf=1.0).sum())
    return 100 + odd - sum(1e-3 * float(p.abs().sum()) for name, p in module.named_parameters() if name != "odd")


@pytest.mark.parametrize("evaluate", [None, sum_of])
@pytest.mark.parametrize("plain", [{}, {"plain": torch.randn(20, 30)}], ids=["alone", "with another"])
@pytest.mark.parametrize("name", ["constant", "empty", "one element", "zero dimensions", "not finite"])
@pytest.mark.parametrize(
    # Without other weights, there is nothing to search for.
    ("method", "search", "search_alone"),
    [("grid", "scale", "scale"), ("published", "exhaustive", "neighbourhood")],
    ids=["grid", "published"],
)
def test_a_search_works_with_weights_that_cannot_be_quantized(
    tmp_path, name, plain, evaluate, method, search, search_alone
):
    odd = {**NOT_QUANTIZED, "not finite": grown(torch.randn(20, 30), math.inf)}[name]
    options = {"quality": dq.Quality(method=method), "evaluate": evaluate}
    restored, record = round_trip(tmp_path, module_of(odd=odd, **plain), **options)
    assert bits(restored["odd"].detach()) == bits(odd)
    assert record.search == (search if plain else search_alone)
    assert record.notes == (NOTES_ON_ODD if name == "not finite" else [])


@EITHER_QUANTIZER
def test_a_weight_that_becomes_finite_again_is_quantized_again(tmp_path, fixed):
    module = module_of(w=torch.randn(200, 300))
    sizes = []
    with dq.Checkpointer(tmp_path, module, quality=dq.Quality(configuration=fixed)) as ckpt:
        for step, value in enumerate((0.5, math.nan, 0.5, 0.6)):
            module.w.data[3, 4] = value
            sizes.append(ckpt.save(step).result().roles["weight"].stored)
    assert sizes[1] > 3 * sizes[0]
    assert sizes[2] < sizes[1] / 3
    assert bits(dq.load(tmp_path, 1)["model"]["w"])[1:3] == ("torch.float32", (200, 300))
    assert dq.load(tmp_path, 1)["model"]["w"][3, 4].isnan()
    assert dq.load(tmp_path, 3)["model"]["w"].isfinite().all()


@EITHER_QUANTIZER
def test_float64_weights_beyond_float32_are_restored_exactly(tmp_path, fixed):
    module = module_of(odd=grown(torch.randn(20, 30, dtype=torch.float64), 1e300))
    restored, _ = round_trip(tmp_path, module, quality=dq.Quality(configuration=fixed))
    assert bits(restored["odd"]) == bits(module.odd)


@EITHER_QUANTIZER
def test_integer_parameters_are_restored_exactly(tmp_path, fixed):
    module = nn.Module()
    module.register_parameter("codes", nn.Parameter(torch.arange(600).reshape(20, 30), requires_grad=False))
    with dq.Checkpointer(tmp_path, module, quality=dq.Quality(configuration=fixed)) as ckpt:
        ckpt.save(1)
    assert bits(dq.load(tmp_path)["model"]["codes"]) == bits(module.codes)


VIEWS = {
    "transposed": lambda: torch.randn(30, 20).t(),
    "strided": lambda: torch.randn(40, 60)[::2, ::2],
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 30).expand(20, 30),
    "part of another": lambda: torch.randn(1000)[17:617].view(20, 30),
}


@EITHER_QUANTIZER
@pytest.mark.parametrize("name", VIEWS)
def test_weights_in_any_layout_are_quantized_like_contiguous_ones(tmp_path, name, fixed):
    weight = VIEWS[name]()
    seen = []
    evaluate = lambda m: seen.append(m.w.detach().clone()) or 1.0  # noqa: E731
    _, record = round_trip(
        tmp_path / "view", module_of(w=weight), quality=dq.Quality(configuration=fixed), evaluate=evaluate
    )
    loaded = dq.load(tmp_path / "view")["model"]["w"]
    assert record.roles["weight"].ratio > 0.7 * 3.25  # the smallest measured ratio of these small tensors
    assert bits(loaded) == bits(seen[-1]) != bits(seen[0]) == bits(weight)
    round_trip(tmp_path / "contiguous", module_of(w=weight.contiguous()), quality=dq.Quality(configuration=fixed))
    assert bits(loaded) == bits(dq.load(tmp_path / "contiguous")["model"]["w"])
    assert (loaded - weight).abs().max() < weight.abs().max()


@EITHER_QUANTIZER
def test_tied_weights_are_stored_once_and_stay_tied(tmp_path, fixed):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 20)
            self.head = nn.Linear(20, 50, bias=False)
            self.head.weight = self.embedding.weight

    model, seen = Tied(), []
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embedding(torch.arange(50))).sum().backward()
    optimizer.step()

    def evaluate(m: nn.Module) -> float:
        assert m.head.weight is m.embedding.weight
        seen.append(m.head.weight.detach().clone())
        return 1.0

    with dq.Checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(configuration=fixed)
    ) as ckpt:
        record = ckpt.save(1).result()
    assert record.roles["weight"].raw == 50 * 20 * 4
    loaded = dq.load(tmp_path)["model"]
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    other = Tied()
    with dq.Checkpointer(
        tmp_path, other, torch.optim.AdamW(other.parameters()), quality=dq.Quality(configuration=fixed)
    ) as ckpt:
        ckpt.restore()
    assert other.head.weight is other.embedding.weight
    assert bits(other.head.weight.detach()) == bits(seen[-1]) != bits(seen[0])


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.lists(st.integers(0, 6), max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(1, 20).map(lambda bins: dq.Configuration(bins=bins))
    | st.integers(-3000, 3000).map(dq.GridConfiguration),
)
def test_weights_of_any_bit_pattern_are_restored_as_they_were_evaluated(
    tmp_path_factory, dtype, shape, seed, configuration
):
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    weight = data.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    seen = []
    folder = tmp_path_factory.mktemp("any")
    evaluate = lambda m: seen.append(bits(m.w.detach())) or 1.0  # noqa: E731
    with dq.Checkpointer(
        folder, module_of(w=weight), evaluate=evaluate, quality=dq.Quality(configuration=configuration)
    ) as ckpt:
        ckpt.save(1)
    assert seen[0] == bits(weight)
    assert seen[-1] == bits(dq.load(folder)["model"]["w"])


# States that ``flatten`` never makes, in files with valid checksums


def test_a_broken_tree_is_an_error_that_names_the_file(tmp_path):
    path = write(tmp_path, header(entry(), tree={"dict": [["model", {"tensor": "nowhere"}]]}), b"\0" * 8)
    with pytest.raises(dq.DynaquantError, match=path.name):
        dq.load(tmp_path)


@pytest.mark.parametrize("tree", [None, 5, [], {"dict": []}, {"dict": [["model", 5]]}], ids=str)
def test_a_file_without_a_training_state_is_an_error(tmp_path, tree):
    write(tmp_path, header(tree=tree))
    with dq.Checkpointer(tmp_path, nn.Module()) as ckpt, pytest.raises(dq.DynaquantError):
        ckpt.restore()


@pytest.mark.parametrize("record", [{"seconds": 5}, {"notes": 5}], ids=str)
def test_a_malformed_record_is_an_error(tmp_path, record):
    write(tmp_path, header(record=record))
    with dq.Checkpointer(tmp_path, nn.Module()) as ckpt, pytest.raises(dq.CheckpointError):
        ckpt.records()


STRANGE_RECORDS = [
    {},
    {"interval": "soon"},
    {"interval": 0},
    {"interval": -5},
    {"interval": 2.5},
    {"interval": []},
    {"interval": True},
    {"configuration": []},
    {"configuration": 5},
    {"configuration": {"nonsense": 1}},
    {"configuration": {"bins": "16"}},
    {"configuration": {"bins": 0}},
    {"configuration": {"bins": 16.5}},
    {"configuration": {"pruned": []}},
    {"configuration": {"pruned": 2}},
    {"configuration": {"pruning_metric": []}},
    {"configuration": {"bins": 7, "embedding_bins": 1, "pruned": 0.99, "protected": 0.9}},
    {"configuration": {"scale": "16"}},
    {"configuration": {"scale": 10**9, "dithered": True}},
    {"search": []},
    {"search": "exhaustive"},
    {"search": {"history": {"scale": {"exponent": "16", "levels": []}}}},
    {"search": {"history": {"scale": {"exponent": 10**9, "levels": [1e300]}}}},
    {"search": {"history": {"scale": {"exponent": 0, "levels": [1.7e308] * 4}}}},
    {"search": {"history": {"scale": {"exponent": 0, "levels": [5e-324]}}}},
    {"search": {"history": {"-7": {"bins": 16}}}},
    {"search": {"max_degradation": []}},
    {"search": {"max_degradation": "much"}},
    {"search": {"max_degradation": "nan"}},
    {"quality": 5},
    {"quality": {"restored": {}}},
    {"quality": {"restored": "nan"}},
    {"quality": {"restored": "inf"}},
    {"quality": {"restored": "nonsense"}},
]


@pytest.mark.parametrize("method", ["grid", "published"])
@pytest.mark.parametrize("strange", STRANGE_RECORDS, ids=lambda strange: str(strange)[:60])
def test_a_valid_state_is_restored_even_if_its_record_is_malformed(tmp_path, strange, method):
    module = module_of(w=torch.randn(20, 30))
    options = {
        "evaluate": lambda m: 1 + float((m.w**2).mean()),
        "every": dq.Auto(),
        "quality": dq.Quality(method=method),
    }
    with dq.Checkpointer(tmp_path, module, **options) as ckpt:
        ckpt.save(1)
        path = Run(tmp_path).path(1)
    for rest in (CheckpointFile(path).header.record, {}):
        rewrite(path, lambda header, rest=rest: header.update(record=dict(rest) | strange))
        with dq.Checkpointer(tmp_path, module, **options) as ckpt:
            assert ckpt.restore(1) == 1
            assert ckpt.due(10**9)
            assert ckpt.save(2).result().configuration is not None


def test_an_older_checkpoint_is_restored_if_the_newest_file_is_hostile(tmp_path):
    module = module_of(w=torch.randn(20, 30))
    with dq.Checkpointer(tmp_path, module, quality=dq.Quality(configuration=FIXED)) as ckpt:
        ckpt.save(1)
    claim = entry("w", b"", shape=[10**12], coding={"kind": "reference"})
    hostile = [
        header(claim, step=2, sequence=8, parent={"step": 10**300, "identity": "0" * 64}),
        header(claim, step=3, sequence=7, parent={"step": 3, "identity": "0" * 64}),
        header(entry("w", b"", shape=[0]), step=4, sequence=6, tree={"dict": [["model", {"device": "nonsense"}]]}),
    ]
    for plain in hostile:
        write(tmp_path, plain)
    with dq.Checkpointer(tmp_path, module) as ckpt:
        assert ckpt.restore() == 1
    assert len(ckpt.skipped) == 3
    assert {summary.step for summary in Run(tmp_path).summaries()[0]} >= {1}
