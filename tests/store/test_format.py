"""The file format is what docs/format.md says: a decoder written from that page alone agrees with dynaquant.

The files in golden/v1 were written once, and must stay readable forever.
"""

import base64
import json
import shutil
from collections import Counter, OrderedDict
from pathlib import Path

import format_streams
import numpy as np
import pytest
import torch
from format_decoder import KINDS as SECOND_KINDS
from format_decoder import decode, decode_exact, decode_single
from format_streams import check
from make_golden import summary
from torch import nn
from training import bits

import dynaquant
from dynaquant.engine.forms.schemes import KINDS
from dynaquant.store.commit import WritableRun
from dynaquant.store.recoding import compact

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
CHECKPOINTS = [(GOLDEN, int(file.stem[5:])) for file in sorted(GOLDEN.glob("step-*.dqc"))]
EVERY_CHECKPOINT = pytest.mark.parametrize(("folder", "step"), CHECKPOINTS, ids=[str(step) for _, step in CHECKPOINTS])
QUANTIZED = {"float32", "float64", "bfloat16", "float16"}


def tensor_of(dtype, shape, values):
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(values), dtype=kind).reshape(shape) if values else torch.empty(shape, dtype=kind)


def laid_out(tensor, node):
    """The tensor in the layout that its node says."""
    if "strides" not in node:
        return tensor
    between = 1
    for stride, size in sorted(zip(node["strides"], tensor.shape, strict=True)):
        check(size == 1 or stride == between, "strides without gaps")
        between *= size
    return torch.empty_strided(tensor.shape, node["strides"], dtype=tensor.dtype).copy_(tensor)


def state_of(node, tensors):
    """The state that a tree describes, according to docs/format.md."""
    if isinstance(node, list):
        return [state_of(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    kind, content = next(iter(node.items()))
    if kind in ("dict", "ordered_dict", "counter"):
        mapping = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}[kind]()
        mapping.update((state_of(key, tensors), state_of(value, tensors)) for key, value in content)
        if "metadata" in node:
            mapping._metadata = state_of(node["metadata"], tensors)
        return mapping
    if kind in ("tuple", "set", "frozenset", "size"):
        build = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}[kind]
        return build(state_of(content, tensors))
    return {
        "tensor": lambda name: laid_out(tensor_of(*tensors[name]), node),
        "parameter": lambda name: nn.Parameter(laid_out(tensor_of(*tensors[name]), node)),
        "ndarray": lambda name: laid_out(tensor_of(*tensors[name]), node).numpy(),
        "scalar": lambda pair: np.frombuffer(base64.b64decode(pair[1]), pair[0])[0],
        "float": float,
        "complex": lambda pair: complex(*map(float, pair)),
        "bytes": base64.b64decode,
        "dtype": lambda name: getattr(torch, name),
        "device": torch.device,
    }[kind](content)


def assert_both_decode_alike(folder, step, known=None):
    header, tensors = decode(folder, step, known)
    assert_alike(state_of(header["tree"], tensors), dynaquant.load(folder, step))
    return header


def strides_in(value):
    if isinstance(value, torch.Tensor):
        return value.stride()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return value.strides if isinstance(value, np.ndarray) else [strides_in(each) for each in inner]


def assert_alike(second, first):
    assert bits(second) == bits(first)
    assert bits(getattr(second["model"], "_metadata", {})) == bits(getattr(first["model"], "_metadata", {}))


@EVERY_CHECKPOINT
def test_the_second_decoder_reads_the_values_of_golden_files(folder, step):
    expected = json.loads((folder / "expected.json").read_text())
    assert summary(*decode(folder, step)) == expected[str(step)]


@EVERY_CHECKPOINT
def test_dynaquant_reads_golden_files_as_the_second_decoder_does(folder, step):
    assert_both_decode_alike(folder, step)


def entries_of_golden_files():
    """All entries by step and name, and the schemes of their parents."""
    headers = {step: decode(folder, step)[0] for folder, step in CHECKPOINTS}
    entries = {(step, entry["name"]): entry for step, header in headers.items() for entry in header["tensors"]}
    above = {
        (step, entry["name"]): entries[parent["step"], entry["name"]]["coding"]
        for step, header in headers.items()
        for parent in header["parents"]
        for entry in header["tensors"]
        if (parent["step"], entry["name"]) in entries  # one that was frozen has another place
    }
    return entries, above


def test_the_second_decoder_knows_every_scheme():
    assert set(KINDS) == SECOND_KINDS


def test_every_scheme_occurs_in_the_golden_files():
    entries, above = entries_of_golden_files()
    assert {entry["coding"]["kind"] for entry in entries.values()} == SECOND_KINDS
    seen = {entry["coding"]["kind"]: set() for entry in entries.values()}
    for key, entry in entries.items():
        coding, parent = entry["coding"], above.get(key, {})
        for part in (coding, *(coding[name] for name in ("units", "rows", "columns") if name in coding)):
            seen[coding["kind"]].add(
                (part.get("codebook"), part.get("needs_parent"), part.get("protected", 0) > 0, parent.get("codebook"))
            )
    both = (True, False)
    assert {needs_parent for _, needs_parent, _, _ in seen["exact"]} == {*both}
    for kind in ("conditional", "units", "rank_one"):
        assert {needs_parent for _, needs_parent, _, _ in seen[kind]} >= {*both}
    codebooks = {(codebook, needs_parent, above) for codebook, needs_parent, _, above in seen["conditional"]}
    assert {(codebook, needs) for codebook, needs, _ in codebooks} == {
        (codebook, needs) for codebook in ("grid", "log_grid", "centres") for needs in both
    }
    assert {("grid", True, "grid"), ("centres", True, "grid"), ("centres", True, "centres")} <= codebooks
    assert {(c, protected) for c, _, protected, _ in seen["conditional"]} >= {("grid", True), ("centres", True)}
    assert {entry["coding"].get("arrangement") for entry in entries.values()} >= {"alone", "delta"}


class Wide(nn.Module):
    """A small model with one tensor of more than one block."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.wide = nn.Linear(16, 4_100, dtype=dtype)
        self.head = nn.Linear(82, 32)

    def forward(self, tokens):
        x = self.wide(self.embedding(tokens).to(self.wide.weight.dtype)).float()
        return self.head(x.unflatten(1, (50, 82)).relu().sum(1))


@pytest.mark.parametrize(
    ("dtype", "bins"),
    [
        (torch.float32, (16, 16, 16)),
        (torch.bfloat16, (254, 1, 254)),
        (torch.float16, (3, 40, 7)),
        (torch.float64, (1, 1, 2)),
    ],
)
def test_both_decoders_agree_on_the_current_version(tmp_path, dtype, bins):
    model = Wide(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, count in enumerate(bins):
        configuration = dynaquant.Configuration(bins=count, embedding_bins=count)
        with dynaquant.Checkpointer(
            tmp_path, model, optimizer, quality=dynaquant.Quality(configuration=configuration)
        ) as ckpt:
            ckpt.restore()
            for _ in range(3):
                tokens = torch.randint(0, 32, (16,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(tokens), tokens).backward()
                optimizer.step()
            ckpt.save(step)
    header = assert_both_decode_alike(tmp_path, 2)
    assert [parent["step"] for parent in header["parents"]] == [1]
    wide = next(entry for entry in header["tensors"] if entry["name"] == "model.wide.weight")
    assert wide["coding"]["arrangement"] == "rearranged"


class Layers(nn.Module):
    """Layers whose coders need one state or several (``even``), and one with a given number of elements (``wide``)."""

    def __init__(self, dtype, wide):
        super().__init__()
        self.small = nn.Linear(20, 30, dtype=dtype)
        self.embedding = nn.Embedding(50, 20)
        self.even = nn.Linear(90, 100, dtype=dtype)
        self.norm = nn.LayerNorm(30)
        self.wide = nn.Linear(wide // 16, 16, dtype=dtype)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.zero = nn.Parameter(torch.zeros(7, 5))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.still = nn.Parameter(torch.arange(30, dtype=dtype))  # no gradient reaches it
        with torch.no_grad():
            self.even.weight[0, :2] = torch.tensor([60.0, -40.0])

    def gradients(self):
        """Random gradients: those of ``even`` have squares of rank one, those of ``wide`` shrink from row to row."""
        gradients = {name: torch.randn_like(p) / 8 for name, p in self.named_parameters()}
        squares = torch.outer(torch.linspace(0.01, 1, 100), torch.linspace(1, 3, 90))
        gradients["even.weight"] = squares * gradients["even.weight"].sign()
        gradients["wide.weight"] *= (0.5 ** torch.arange(16)).to(self.wide.weight.dtype)[:, None]
        return gradients

    def train_on(self, optimizer):
        optimizer.zero_grad()
        self.zero_grad()
        gradients = self.gradients()
        moved = [(name, p) for name, p in self.named_parameters() if name != "still"]
        sum((p.float() * gradients[name].float()).sum() for name, p in moved).backward()
        optimizer.step()


class Masters(torch.optim.AdamW):
    """The optimizer of a model in half precision. The float32 master weights are the state of an extra."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.copies = [p.detach().float().clone().requires_grad_() for p in self.weights]
        super().__init__(self.copies, lr=0.01)

    def step(self):
        for copy, weight in zip(self.copies, self.weights, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        with torch.no_grad():
            for copy, weight in zip(self.copies, self.weights, strict=True):
                weight.copy_(copy)


class Copies:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"copies": self.optimizer.copies}

    def load_state_dict(self, state):
        pass


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def saved_run(folder, optimizer_of, saves=3, *, dtype=torch.float32, wide=800, **settings):
    """A model after a training that was saved at steps 0, 1, …; ``Masters`` of its optimizer are an extra."""
    model = Layers(dtype, wide)
    optimizer = optimizer_of(model)
    if isinstance(optimizer, Masters):
        settings["extras"] = {"masters": Copies(optimizer)}
    with dynaquant.Checkpointer(folder, model, optimizer, **settings) as ckpt:
        for step in range(saves):
            model.train_on(optimizer)
            model.train_on(optimizer)
            ckpt.save(step)
    return model


def codings_in(folder, saves=3):
    """The schemes in a chain of checkpoints. Asserts that both decoders read all checkpoints alike."""
    known, found = {}, set()
    for step in range(saves):
        header = assert_both_decode_alike(folder, step, known)
        assert (header["parents"] == []) == (step == 0)
        for entry in header["tensors"]:
            found |= set(names_of(entry))
    return found


def names_of(entry):
    """``<kind> <dtype>``, with ``+`` if the parent is needed; for quantized parts also ``<kind> <codebook>``."""
    coding = entry["coding"]
    kind = coding["kind"]
    parts = [coding[key] for key in ("units", "rows", "columns") if key in coding]
    for part in [coding] if kind == "conditional" else parts:
        yield f"{kind} {part['codebook']}" + "+" * part["needs_parent"]
        if part["protected"]:
            yield f"{kind} protected"
    yield f"{kind} {entry['dtype']}" + "+" * (kind == "exact" and coding["needs_parent"])
    if kind == "quantized":
        yield f"{kind} {coding['arrangement']}"


MOMENTS = {
    "conditional grid",
    "conditional grid+",
    "conditional protected",
    "conditional log_grid",
    "conditional log_grid+",
    "units grid",
}


@pytest.mark.parametrize("dtype", sorted(QUANTIZED))
def test_both_agree_on_grids_and_moments(tmp_path, dtype):
    saved_run(tmp_path, adamw, dtype=getattr(torch, dtype))
    kinds = {f"{kind} {dtype}" for kind in ("conditional", "units", "reference")}
    assert codings_in(tmp_path) >= MOMENTS | kinds


@pytest.mark.parametrize("dtype", sorted(QUANTIZED))
def test_both_agree_on_rows_and_columns(tmp_path, dtype):
    saved_run(tmp_path, adamw, dtype=getattr(torch, dtype), quality="small")
    assert codings_in(tmp_path) >= {f"rank_one {dtype}", "rank_one log_grid", "rank_one log_grid+"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_agree_on_fine_moments(tmp_path, dtype):
    saved_run(tmp_path, adamw, 2, dtype=getattr(torch, dtype), quality="high")
    assert codings_in(tmp_path, 2) >= MOMENTS | {"units grid+", f"units {dtype}"}


def test_both_agree_on_several_blocks_of_levels(tmp_path):
    saved_run(tmp_path, adamw, 2, wide=132_000)
    assert codings_in(tmp_path, 2) >= {"conditional grid+", "conditional log_grid", "units grid"}


def test_both_agree_on_coarse_moments(tmp_path):
    saved_run(tmp_path, adamw, quality="small")
    assert codings_in(tmp_path) >= {"conditional grid+", "rank_one log_grid+", "units grid"}


def test_both_agree_on_momentum(tmp_path):
    saved_run(tmp_path, sgd)
    assert codings_in(tmp_path) >= {"conditional grid", "conditional grid+"}


@pytest.mark.parametrize("dtype", sorted(QUANTIZED))
def test_both_agree_on_exact_values(tmp_path, monkeypatch, dtype):
    planes, plane = set(), format_streams.exact_plane
    monkeypatch.setattr(
        format_streams, "exact_plane", lambda stream, *rest: planes.add(stream[0]) or plane(stream, *rest)
    )
    saved_run(tmp_path, adamw, 2, dtype=getattr(torch, dtype), wide=66_000, quality="lossless")
    assert codings_in(tmp_path, 2) >= {f"exact {dtype}", f"exact {dtype}+"}
    by_previous_byte = set() if dtype == "float16" else {4}  # not worth it there: too few bits are exponent
    assert planes >= {0, 1, 2, 3} | by_previous_byte


def test_both_agree_on_layouts(tmp_path):
    images = torch.randn(2, 3, 4, 5)
    state = {
        "model": {"transposed": images.transpose(1, 3), "plain": images, "one": torch.randn(4, 1, 3).transpose(0, 2)},
        "channels last": nn.Parameter(images.to(memory_format=torch.channels_last)),
        "gaps": [images[:, :, ::2].transpose(0, 2), images[:, 0, :, 0]],
        "array": np.asfortranarray(images[0].numpy()),
    }
    dynaquant.save(state, tmp_path / "state.dqc", quality="lossless")
    header, tensors = decode_single(tmp_path / "state.dqc")
    second, first = state_of(header["tree"], tensors), dynaquant.load(tmp_path / "state.dqc")
    assert bits(second) == bits(first) == bits(state)
    assert strides_in(second) == strides_in(first)
    assert strides_in(first["model"]) == strides_in(state["model"])
    assert json.dumps(header["tree"]).count("strides") == 5


def test_both_agree_on_golden_files_after_these_were_recoded(tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    run = WritableRun(tmp_path)
    with run.locked():
        recoded = list(compact(run, 3))
    known, found = {}, set()
    for step in recoded:
        header = assert_both_decode_alike(tmp_path, step, known)
        found |= {name for entry in header["tensors"] for name in names_of(entry)}
    assert found >= {"conditional centres", "conditional centres+", "conditional protected"}


def test_both_agree_on_the_published_method(tmp_path):
    # Given, as the estimate would keep this model exact: its gradients are strong where its weights are small.
    quality = dynaquant.Quality(method="published", configuration=dynaquant.Configuration())
    saved_run(tmp_path, adamw, 2, quality=quality)
    assert codings_in(tmp_path, 2) >= {"quantized alone", "quantized delta", "quantized rearranged"}


def test_both_agree_when_the_method_changes(tmp_path):
    model = Layers(torch.float32, 800)
    optimizer = adamw(model)
    methods = "published", "grid", "published"
    for step, method in enumerate(methods):
        with dynaquant.Checkpointer(tmp_path, model, optimizer, quality=dynaquant.Quality(method=method)) as ckpt:
            ckpt.restore()
            model.train_on(optimizer)
            ckpt.save(step)
    assert codings_in(tmp_path, len(methods)) >= {"conditional grid+", "quantized rearranged"}


@pytest.mark.parametrize(("dtype", "quality"), [("bfloat16", "balanced"), ("float16", "lossless")])
def test_both_agree_on_weights_that_are_rounded_master_weights(tmp_path, dtype, quality):
    saved_run(tmp_path, Masters, 2, dtype=getattr(torch, dtype), quality=quality)
    assert codings_in(tmp_path, 2) >= {f"rounding {dtype}"}


def test_both_agree_on_a_checkpoint_and_its_lossless_copy(tmp_path):
    model = saved_run(tmp_path, adamw, keep=dynaquant.Keep(lossless_copy=True))
    header, tensors = decode_exact(tmp_path, 2)
    state = state_of(header["tree"], tensors)
    assert_alike(state, dynaquant.load(tmp_path))
    assert bits(state["model"]) == bits(model.state_dict())
    beside = decode(tmp_path, 2)[0]
    assert all(header[key] == beside[key] for key in ("step", "sequence", "tree"))
    assert {entry["coding"]["kind"] for entry in header["tensors"]} >= {"exact"}

    (exact,) = tmp_path.glob("exact-*.dqc")
    exact.unlink()
    assert codings_in(tmp_path) >= MOMENTS
