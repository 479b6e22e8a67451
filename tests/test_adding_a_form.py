"""A stored form that this file adds: it is written, read, verified and shown, and no other file knows of it."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from commands import call, data
from numpy.typing import NDArray

from dynaquant.engine.forms import schemes
from dynaquant.engine.forms.form import Coded, Form, stored_equal
from dynaquant.engine.forms.registry import DECODERS, register
from dynaquant.engine.forms.scheme import Scheme
from dynaquant.engine.forms.stored import cut, values_of
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.errors import CheckpointError
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage
from dynaquant.store.writing import Checkpoint


@dataclass(frozen=True)
class Signs(Scheme):
    """One bit for each value: its sign. magnitude: of all values."""

    kind = "signs"
    needs_parent = False
    magnitude: float

    def _check(self, shape, size):
        if size != -(-math.prod(shape) // 8) or not 0 < self.magnitude < math.inf:
            raise ValueError("its signs do not fit its shape")


@dataclass(frozen=True)
class SignTensor(Form):
    """A tensor whose values have one magnitude. negative: bool, flat in C order."""

    dtype: torch.dtype
    shape: torch.Size
    magnitude: float
    negative: NDArray

    def pieces(self, size, device, out=None):  # noqa: ARG002 - may be ignored
        for begin in range(0, self.negative.size, size):
            negative = torch.from_numpy(self.negative[begin : begin + size]).to(device)
            yield torch.where(negative, -self.magnitude, self.magnitude).to(self.dtype)

    def encode(self, parent, coder):  # noqa: ARG002
        return Signs(self.magnitude), np.packbits(self.negative).tobytes()

    def cut(self, box):
        negative = self.negative.reshape(self.shape)[box.slices].reshape(-1)
        return replace(self, shape=torch.Size(box.sizes), negative=negative)

    def describe(self):
        return f"its values are {self.magnitude:.6g} with a sign each"


def decode_signs(scheme: Signs, coded: Coded) -> SignTensor:
    bits = np.frombuffer(coded.stream, dtype=np.uint8)
    negative = np.unpackbits(bits, count=coded.shape.numel()).astype(bool)
    return SignTensor(coded.dtype, coded.shape, scheme.magnitude, negative)


@pytest.fixture
def registered():
    """The form is known while a test runs."""
    register(Signs, decode_signs)
    yield
    del schemes.KINDS["signs"], DECODERS["signs"]


def signs_of(tensor):
    return SignTensor(tensor.dtype, tensor.shape, float(tensor.abs().mean()), (tensor < 0).numpy().reshape(-1))


@pytest.fixture
def run(registered, tmp_path):  # noqa: ARG001
    """A run of two checkpoints. In the second, one of the two tensors of the form is unchanged."""
    torch.manual_seed(0)
    tensors = {name: signs_of(torch.randn(40, 25)) for name in ("a", "b")} | {"bias": torch.ones(5)}
    labels = {name: Label("weight") for name in tensors}
    writer, base = WritableRun(tmp_path), None
    with writer.locked():
        for step in (10, 20):
            _, base = writer.commit(Checkpoint(step, state_dict_tree(tensors), dict(tensors), labels), base)
            tensors["a"] = signs_of(torch.randn(40, 25))
    return Run(tmp_path)


def test_a_checkpoint_holds_tensors_of_the_form(run):
    first, second = (run.load(run.file(step)) for step in (10, 20))
    assert all(isinstance(tensors[name], SignTensor) for tensors in (first, second) for name in "ab")
    assert stored_equal(first["b"], second["b"])
    assert not stored_equal(first["a"], second["a"])
    assert values_of(second["a"]).unique().numel() == 2
    assert [entry.scheme.kind for entry in run.file(20).header.entries[:2]] == ["signs", "reference"]
    assert run.file(20).header.by_name["a"].size == 40 * 25 / 8


def test_a_box_of_it_has_the_form_and_the_values(run):
    stored, box = run.load(run.file(10))["a"], Box((8, 3), (20, 11))
    found = cut(stored, box)
    assert isinstance(found, SignTensor)
    assert torch.equal(values_of(found), values_of(stored)[box.slices])


def test_verify_finds_damage_in_its_stream(run):
    assert damage(run, 20) is None
    path = run.path(20)
    content = bytearray(path.read_bytes())
    content[16] ^= 1  # the first sign of "a"
    path.write_bytes(content)
    assert "tensor a does not decode to the values that were stored" in str(damage(run, 20))


def test_show_describes_it(run):
    shown = call("show", run.folder, 10, "--tensor", "a")
    assert "signs, 1.000 bits per value" in shown
    assert "with a sign each" in shown
    assert [each["coding"] for each in data("show", run.folder, 10)["tensors"]] == ["signs", "signs", "exact"]


def test_a_reader_that_does_not_know_the_form_refuses_the_file(run, monkeypatch):
    monkeypatch.delitem(schemes.KINDS, "signs")
    with pytest.raises(
        CheckpointError, match="needs what this dynaquant cannot read: coding signs; install a newer one"
    ):
        run.file(10)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("given", [{}, {"magnitude": "1"}, {"magnitude": 1.0, "more": 1}])
def test_a_header_with_other_fields_is_refused(given):
    with pytest.raises(TypeError, match="magnitude"):
        schemes.parse({"kind": "signs", **given})


@pytest.mark.usefixtures("registered")
def test_two_forms_cannot_have_one_kind():
    with pytest.raises(ValueError, match="signs"):
        register(Signs, decode_signs)
