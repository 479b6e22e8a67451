"""A restore fills existing memory. Decoding in pieces gives the same values as decoding at once."""

import numpy as np
import pytest
import torch
from torch import nn
from whole_tensors import quantize_rank_one, quantize_to_log_grid

import dynaquant as dq
from dynaquant.engine import kernels
from dynaquant.engine.forms.form import dequantize, dequantize_into
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.rounded import RoundedWeight
from dynaquant.engine.forms.stored import stored_hash
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.tensors.codebook import FIRST_BIN, PROTECTED, Grid
from dynaquant.engine.tensors.hashing import tensor_hash

ROWS, COLUMNS = 700, 900  # more than one piece on up to four cores


class Shadow:
    """An extra that shares the tensors of a model. It copies the tensors that it loads."""

    def __init__(self, model):
        self.model, self.seen = model, {}

    def state_dict(self):
        return dict(self.model.state_dict())

    def load_state_dict(self, state):
        self.seen = {name: tensor.clone() for name, tensor in state.items()}


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 40)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def memory(model, optimizer):
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [tensor.data_ptr() for tensor in [*model.parameters(), *moments]]


def restored_values(model, optimizer):
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]]


@pytest.mark.parametrize("quality", ["balanced", "lossless"])
def test_a_restore_fills_existing_memory_and_new_memory_with_the_same_values(tmp_path, quality):
    with dq.Checkpointer(tmp_path, *training(), quality=quality) as checkpointer:
        checkpointer.save(1)
    trained = training(1)
    before = memory(*trained)
    with dq.Checkpointer(tmp_path, *trained, quality=quality) as checkpointer:
        assert checkpointer.restore() == 1
        assert memory(*trained) == before
        first = restored_values(*trained)
        trained[0](torch.randn(8, 40)).square().sum().backward()
        trained[1].step()
        checkpointer.restore(1)  # training after the restore must not have changed the stored tensors
        assert all(map(torch.equal, restored_values(*trained), first))
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))
    fresh = model, torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, *fresh, quality=quality) as checkpointer:
        checkpointer.restore()
    assert all(map(torch.equal, restored_values(*fresh), first))


def test_moments_of_another_dtype_than_their_parameter_are_filled_in_place(tmp_path):
    def float32_moments(seed):
        torch.manual_seed(seed)
        parameter = nn.Parameter(torch.rand(30, 20, dtype=torch.bfloat16))
        model, optimizer = nn.ParameterList([parameter]), torch.optim.SGD([parameter])
        optimizer.state[parameter] = {key: torch.rand(30, 20) for key in ("exp_avg", "exp_avg_sq")}
        return model, optimizer

    saved, trained = float32_moments(0), float32_moments(1)
    with dq.Checkpointer(tmp_path, *saved, quality="lossless") as checkpointer:
        checkpointer.save(1)
    before = memory(*trained)
    with dq.Checkpointer(tmp_path, *trained, quality="lossless") as checkpointer:
        checkpointer.restore()
    assert memory(*trained) == before
    for now, then in zip(restored_values(*trained), restored_values(*saved), strict=True):
        assert now.dtype == then.dtype
        assert torch.equal(now, then)


def test_an_extra_that_shares_tensors_with_the_model_gets_the_stored_values(tmp_path):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"shadow": Shadow(model)}) as checkpointer:
        checkpointer.save(1)
    model, optimizer = training(1)
    shadow = Shadow(model)
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"shadow": shadow}) as checkpointer:
        checkpointer.restore()
    for name, tensor in model.state_dict().items():
        assert torch.equal(shadow.seen[name], tensor)


def test_an_extra_that_fails_leaves_the_model_and_the_optimizer_as_they_were(tmp_path):
    class Failing(Shadow):
        def load_state_dict(self, state):  # noqa: ARG002 - extras have this argument
            raise RuntimeError("no")

    model, optimizer = training()
    other = nn.Linear(2, 2)
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"other": Shadow(other)}) as checkpointer:
        checkpointer.save(1)
    model, optimizer = training(1)
    before = restored_values(model, optimizer)
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"other": Failing(other)}) as checkpointer:
        with pytest.raises(RuntimeError, match="no"):
            checkpointer.restore()
        assert all(map(torch.equal, restored_values(model, optimizer), before))


def examples():
    rng = np.random.default_rng(0)
    shape = torch.Size([ROWS, COLUMNS])
    levels = rng.integers(FIRST_BIN, FIRST_BIN + 20, shape.numel()).astype(np.uint8)
    levels[rng.integers(0, levels.size, 1000)] = PROTECTED
    protected = rng.integers(0, 0x7F00, np.count_nonzero(levels == PROTECTED)).astype(np.uint16)
    weight = QuantizedTensor(torch.float32, shape, levels, Grid(-20, 20), protected)
    squares = torch.from_numpy(rng.lognormal(size=(ROWS, 1)) * rng.lognormal(size=COLUMNS)).to(torch.float32)
    second = quantize_rank_one(squares)
    units = QuantizedTensor(torch.float32, shape, np.sort(levels)[::-1].copy(), Grid(0, 20), protected)
    yield from (weight, second, quantize_to_log_grid(squares, 2), ScaledMoment(torch.float32, units, second, "second"))
    yield from (
        RoundedWeight(torch.bfloat16, weight, "weight"),
        RoundedWeight(torch.float16, dequantize(second), "second"),
    )


@pytest.mark.parametrize("stored", list(examples()), ids=lambda stored: type(stored).__name__)
def test_pieces_of_any_size_give_the_same_values(stored, monkeypatch):
    values, digest = dequantize(stored), stored_hash(stored)
    assert digest == tensor_hash(values)
    for size in (1, COLUMNS - 1, 10 * COLUMNS, 1 << 30):
        monkeypatch.setattr(kernels.host, "PIECE", size)
        filled = torch.full(stored.shape, torch.nan, dtype=stored.dtype)
        dequantize_into(filled, stored)
        assert torch.equal(filled, values)
        assert stored_hash(stored) == digest


def test_a_wrong_number_of_outliers_is_found_in_any_piece(monkeypatch):
    monkeypatch.setattr(kernels.host, "PIECE", 4)
    levels = np.array([PROTECTED, 2, 2, 2, 2, 2, PROTECTED, 2, 2], dtype=np.uint8)
    for count in (0, 1, 3):
        protected = np.zeros(count, dtype=np.uint16)
        damaged = QuantizedTensor(torch.float32, torch.Size([9]), levels, Grid(0, 2), protected)
        with pytest.raises(ValueError, match="number of protected values"):
            stored_hash(damaged)
