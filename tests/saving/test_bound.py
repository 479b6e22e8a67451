"""``roles={…: dq.Bound(…)}``: saved and restored, shown by the commands, and read by the second decoder."""

import json
import math

import numpy as np
import pytest
import torch
from commands import call
from format_decoder import decode
from safetensors.torch import load_file
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.errors import CheckpointError, StateError
from dynaquant.restore.stored_checkpoint import StoredCheckpoint


class Simulation(nn.Module):
    """A field that diffuses, as a state of a simulation; and a weight that trains."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        x = torch.linspace(0, 3, 80)
        self.register_buffer("field", (torch.sin(x)[:, None] + torch.cos(2 * x)).to(dtype))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.net = model_of()

    @torch.no_grad()
    def advance(self):
        wide = self.field.float()
        around = sum(wide.roll(shift, axis) for shift in (-1, 1) for axis in (0, 1))
        self.field.copy_(wide + 0.1 * (around - 4 * wide))
        self.count += 1


def error(a, b):
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quality", ["balanced", "lossless"])
def test_a_field_is_restored_within_its_bound(tmp_path, dtype, quality):
    torch.manual_seed(0)
    model = Simulation(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    roles = {"model.*field": dq.Bound(absolute=1e-3)}
    fields = {}
    with dq.Checkpointer(tmp_path, model, optimizer, roles=roles, quality=quality) as ckpt:
        for step in range(1, 7):
            model.advance()
            train(model.net, optimizer)
            fields[step] = model.field.clone()
            ckpt.save(step)
        ckpt.wait()
        known = {}
        for step, field in fields.items():
            state = dq.load(tmp_path, step)
            restored = state["model"]["field"]
            assert (restored.dtype, error(restored, field) <= 1e-3) == (dtype, True)
            _, tensors = decode(tmp_path, step, known)
            assert tensors["model.field"][2] == bits(restored)[3]
        assert ckpt.restore(3) == 3
        assert 0 < error(model.field, fields[3]) <= 1e-3
        assert model.count.tolist() == [3, 3, 3]
    entries = StoredCheckpoint(tmp_path, 6).file.header.by_name
    assert (entries["model.field"].label.role, entries["model.count"].label.role) == ("bound", "buffer")
    assert entries["model.field"].needs_parent
    assert entries["model.field"].raw_size > 2 * entries["model.field"].size


def test_what_is_evaluated_is_what_is_restored(tmp_path):
    """A weight with a bound is not part of the search, but the metric sees it as it will be restored."""
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 20)
    seen = []

    def evaluate(bare):
        seen.append(bare[1].weight.detach().clone())
        return float(sum(p.square().sum() for p in bare.parameters()))

    roles = {"model.1.weight": dq.Bound(relative=1e-3)}
    weight = model[1].weight.detach().clone()
    with dq.Checkpointer(tmp_path, model, optimizer, roles=roles, evaluate=evaluate) as ckpt:
        record = ckpt.save(20).result()
        assert record.roles["bound"].raw == weight.numel() * 4
        ckpt.restore()
    restored = model[1].weight.detach()
    assert 0 < error(restored, weight) <= 1e-3 * float(weight.max() - weight.min())
    assert any(torch.equal(candidate, restored) for candidate in seen)
    assert torch.equal(seen[0], weight)


def test_extras_moments_and_tied_weights(tmp_path):
    torch.manual_seed(0)
    model = model_of()
    model[4].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 5)
    fields = {"u": np.random.default_rng(0).normal(size=(40, 30)), "t": torch.tensor(0.75)}
    roles = {
        "fields.*": dq.Bound(absolute=0.01),
        "model.4.weight": dq.Bound(absolute=0.01),
        "optimizer.*exp_avg_sq": dq.Bound(relative=0.001),
    }
    before = {"u": fields["u"].copy(), "w": model[0].weight.detach().clone()}
    seconds = {n: s["exp_avg_sq"].clone() for n, s in zip("abcdef", optimizer.state.values(), strict=False)}
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"fields": fields}, roles=roles) as ckpt:
        ckpt.save(5)
        ckpt.restore()
    assert 0 < np.abs(fields["u"] - before["u"]).max() <= 0.01
    assert abs(float(fields["t"]) - 0.75) <= 0.01
    assert 0 < error(model[0].weight.detach(), before["w"]) <= 0.01
    assert model[4].weight is model[0].weight
    for second, state in zip(seconds.values(), optimizer.state.values(), strict=False):
        assert float(state["exp_avg_sq"].min()) >= 0
        assert error(second, state["exp_avg_sq"]) <= 0.001 * float(second.max() - second.min())


def test_a_field_that_becomes_nan_is_restored_bit_for_bit(tmp_path):
    model = Simulation()
    with dq.Checkpointer(tmp_path, model, roles={"model.field": dq.Bound(absolute=1e-3)}) as ckpt:
        ckpt.save(1)
        model.field[3:9] = math.nan
        model.field[0, 0] = -math.inf
        kept = model.field.clone()
        ckpt.save(2)
        model.field.fill_(math.nan)
        ckpt.save(3)
        ckpt.wait()
        assert dq.load(tmp_path, 3)["model"]["field"].isnan().all()
        ckpt.restore(2)
    finite = kept.isfinite()
    assert torch.equal(finite, model.field.isfinite())
    assert bits(model.field[~finite]) == bits(kept[~finite])
    assert error(model.field[finite], kept[finite]) <= 1e-3


def test_checkpoints_are_coded_anew_with_the_same_values(tmp_path):
    """Levels do not depend on the parent: what is compacted, branched and pruned has the same values."""
    torch.manual_seed(0)
    model = Simulation()
    roles, keep = {"model.field": dq.Bound(relative=1e-4)}, dq.Keep(lossless_copy=True, keyframe_every=3)
    with dq.Checkpointer(tmp_path / "run", model, roles=roles, keep=keep) as ckpt:
        for step in range(1, 8):
            model.advance()
            ckpt.save(step)
    before = {step: bits(dq.load(tmp_path / "run", step)) for step in range(1, 8)}
    call("compact", tmp_path / "run", "--keyframe-every", "7")
    call("branch", tmp_path / "run", "5", tmp_path / "other")
    assert {step: bits(dq.load(tmp_path / "run", step)) for step in range(1, 8)} == before
    assert bits(dq.load(tmp_path / "other", 5)) == before[5]
    call("prune", tmp_path / "run", "--keep-last", "2")
    assert bits(dq.load(tmp_path / "run", 7)) == before[7]


def test_commands_show_tensors_with_a_bound(tmp_path):
    torch.manual_seed(0)
    model = Simulation()
    folder = tmp_path / "run"
    with dq.Checkpointer(folder, model, roles={"model.field": dq.Bound(absolute=1e-3)}) as ckpt:
        for step in (1, 2):
            model.advance()
            ckpt.save(step)
    assert "bound" in call("show", folder)
    assert "every finite value is within 0.001 of the original" in call("show", folder, "--tensor", "model.field")
    shown = json.loads(call("show", folder, "--tensor", "model.field", "--json"))
    assert (shown["role"], shown["coding"], shown["bound"]) == ("bound", "bounded", 1e-3)
    assert 0 < shown["step"] <= 2e-3
    assert "bound" in call("du", folder)
    assert "model.field" in call("diff", folder, "1", "2")
    call("verify", folder)
    call("export", folder, "--out", tmp_path / "model.safetensors")
    assert error(load_file(tmp_path / "model.safetensors")["field"], model.field) <= 1e-3
    call("report", folder, "--out", tmp_path / "report.html")
    assert '"name":"bound"' in (tmp_path / "report.html").read_text()


def test_errors_of_roles(tmp_path):
    model = Simulation()
    with pytest.raises(StateError, match=r"'bound' is not a role; the roles are weight, .*, or a dq\.Bound\(…\)"):
        dq.Checkpointer(tmp_path, model, roles={"model.field": "bound"})
    with pytest.raises(StateError, match="matches no tensor"):
        dq.Checkpointer(tmp_path, model, roles={"model.feild": dq.Bound(absolute=1)})


def test_a_damaged_stream_is_an_error(tmp_path):
    model = Simulation()
    model.field[5] = math.nan
    with dq.Checkpointer(tmp_path, model, roles={"model.field": dq.Bound(absolute=1e-3)}) as ckpt:
        ckpt.save(1)
    file = next(tmp_path.glob("step-*.dqc"))
    whole = file.read_bytes()
    entry = StoredCheckpoint(tmp_path).file.header.by_name["model.field"]
    entries = StoredCheckpoint(tmp_path).file.header.entries
    begin = 16 + sum(e.size for e in entries[: entries.index(entry)])
    for at in range(begin, begin + entry.size, 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            dq.load(tmp_path, 1)
