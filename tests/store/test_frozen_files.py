"""Frozen parameters are restored bit for bit, and cost nothing after the first checkpoint."""

import copy
import logging
import shutil
from contextlib import suppress

import pytest
import torch
from format_decoder import decode
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from training import bits
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.errors import CheckpointError, EvaluateError, StateError
from dynaquant.store.commit import WritableRun
from dynaquant.store.recoding import branch, compact
from dynaquant.store.retention import Retention, prune
from dynaquant.store.run import Run
from dynaquant.training import hash_cache


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin ones (LoRA)."""

    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def adapted_model():
    torch.manual_seed(0)
    return nn.Sequential(Adapted(64, 4500), nn.ReLU(), Adapted(4500, 10))


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        inputs = torch.randn(16, 64)
        F.cross_entropy(model(inputs), inputs[:, :10].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def base_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".base." in name}


INPUTS = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def loss(model):
    return F.cross_entropy(model(INPUTS), INPUTS[:, :10].argmax(1)).item()


def saved_run(folder, saves=4, model=None, **settings):
    model = model or adapted_model()
    optimizer = adamw(model)
    with dq.Checkpointer(folder, model, optimizer, **settings) as ckpt:
        for step in range(1, saves + 1):
            train(model, optimizer)
            ckpt.save(step)
        return model, ckpt.records()


@pytest.mark.parametrize("settings", [{"evaluate": loss, "quality": "small"}, {}, {"quality": "lossless"}])
def test_a_frozen_base_is_restored_bit_for_bit(tmp_path, settings):
    model, _ = saved_run(tmp_path, **settings)
    base = base_of(model)
    for change in (torch.nn.init.zeros_, lambda p: p):  # restored from the file; then found unchanged
        other = adapted_model()
        with torch.no_grad():
            for parameter in (p for name, p in other.named_parameters() if ".base." in name):
                change(parameter)
        with dq.Checkpointer(tmp_path, other, adamw(other), **settings) as ckpt:
            assert ckpt.restore() == 4
        assert bits(base_of(other)) == bits(base)
    assert bits(dict(dq.load(tmp_path)["model"])) == bits(dict(other.state_dict()))


def test_the_frozen_base_is_written_once_for_all_checkpoints(tmp_path):
    _, records = saved_run(tmp_path, keep=dq.Keep(keyframe_every=2))
    (held,) = tmp_path.glob("frozen-*.dqc")
    assert held.stat().st_size > 1_000_000
    assert [record.keyframe for record in records] == [True, False, True, False]
    assert all(record.total.stored < 60_000 for record in records)
    # Tensors that are not in a checkpoint do not count for its ratio.
    trained = 4 * sum(p.numel() for p in adapted_model().parameters() if p.requires_grad)
    assert all(trained < record.total.raw < 4 * trained for record in records)


def test_a_small_frozen_part_is_stored_in_the_checkpoints(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(64, 20), nn.ReLU(), Adapted(20, 10))
    saved_run(tmp_path, model=model)
    assert not list(tmp_path.glob("frozen-*"))
    assert bits(dq.load(tmp_path)["model"]["0.base.weight"]) == bits(model[0].base.weight)


def test_the_frozen_base_is_not_hashed_or_copied_at_every_save(tmp_path, monkeypatch):
    hashed, copied = [], []

    def counted(tensor, hash_of=hash_cache.tensor_hash):
        hashed.append(tuple(tensor.shape))
        return hash_of(tensor)

    monkeypatch.setattr(hash_cache, "tensor_hash", counted)
    model = adapted_model()
    place = model[0].base.weight.data_ptr()

    def evaluate(model):
        copied.append(model[0].base.weight.data_ptr() != place)
        return loss(model)

    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        for step in range(1, 10):
            train(model, optimizer)
            ckpt.save(step)
    assert hashed.count((4500, 64)) <= 2  # and not nine times
    assert not any(copied)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.mul_(1.5),
        lambda p: p.detach().add_(1),
        lambda p: p.detach()[3, 5:6].zero_(),  # no value of the sample
        lambda p: p.set_(p.detach() * 2),
    ],
    ids=["data", "in place", "one value", "other memory"],
)
def test_frozen_parameters_that_the_user_changes_are_saved_with_their_new_values(tmp_path, write):
    model = adapted_model()
    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step in (1, 2):
            ckpt.save(step)
        with torch.no_grad():
            write(model[0].base.weight)
        ckpt.save(3).result()
    assert bits(dq.load(tmp_path, 3)["model"]["0.base.weight"]) == bits(model[0].base.weight)
    assert bits(dq.load(tmp_path, 2)["model"]["0.base.weight"]) != bits(model[0].base.weight)


def test_a_write_that_bypasses_version_counters_is_detected_after_some_checkpoints_and_logged(tmp_path, caplog):
    model = adapted_model()
    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step in (1, 2):
            ckpt.save(step)
        model[0].base.weight.data[3, 5:6] = 7.0
        for step in range(3, 3 + hash_cache.HASH_AFTER + 1):
            ckpt.save(step)
    assert dq.load(tmp_path)["model"]["0.base.weight"][3, 5] == 7.0
    assert "0.base.weight does not train" in caplog.text


def test_an_average_of_weights_is_conditioned_on_the_parent(tmp_path):
    model = adapted_model()
    model.average = nn.Linear(64, 4500).requires_grad_(False)
    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step in range(1, 5):
            with torch.no_grad():
                model.average.weight.lerp_(torch.randn(4500, 64), 1e-5)
            record = ckpt.save(step).result()
            assert bits(dq.load(tmp_path)["model"]["average.weight"]) == bits(model.average.weight)
    assert len(list(tmp_path.glob("frozen-*.dqc"))) == 1
    assert record.roles["exact"].ratio > 1.5


def test_unfrozen_parameters_are_quantized_and_parameters_frozen_later_are_not(tmp_path):
    model = adapted_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step, frozen in enumerate([True, False, True, True], 1):
            model[0].base.requires_grad_(not frozen)
            train(model, optimizer)
            ckpt.save(step).result()
            same = bits(dq.load(tmp_path)["model"]["0.base.weight"]) == bits(model[0].base.weight)
            assert same == frozen


def test_parameters_in_no_optimizer_are_stored_exactly_and_the_record_says_so(tmp_path):
    model = adapted_model().requires_grad_(True)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        train(model, optimizer)
        record = ckpt.save(1).result()
    assert bits(dq.load(tmp_path)["model"]["0.base.weight"]) == bits(model[0].base.weight)
    assert bits(dq.load(tmp_path)["model"]["2.base.weight"]) != bits(model[2].base.weight)
    assert any("in no optimizer" in note for note in record.notes)


def test_roles_may_quantize_frozen_parameters(tmp_path):
    model, records = saved_run(tmp_path, roles={"*.base.weight": "weight"})
    assert records[-1].roles["weight"].raw > 1_000_000
    assert bits(dq.load(tmp_path)["model"]["0.base.weight"]) != bits(model[0].base.weight)
    assert records[-1].roles["weight"].stored < 10_000  # the base is a reference to the previous checkpoint


def test_omitted_parameters_are_not_stored_and_compared_when_restored(tmp_path):
    model, records = saved_run(tmp_path, roles={"*.base.*": "omit"})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    assert all(".base." not in name for name in dq.load(tmp_path)["model"])
    assert records[-1].total.raw < 1_000_000

    same = adapted_model()
    with dq.Checkpointer(tmp_path, same, adamw(same)) as ckpt:
        assert ckpt.restore() == 4
    assert bits(base_of(same)) == bits(base_of(model))

    other = adapted_model()
    with torch.no_grad():
        other[2].base.bias[3] += 1
    before = bits(other.state_dict())
    with (
        dq.Checkpointer(tmp_path, other, adamw(other)) as ckpt,
        pytest.raises(StateError, match=r"model\.2\.base\.bias is not stored"),
    ):
        ckpt.restore()
    assert bits(other.state_dict()) == before


def test_a_change_of_an_omitted_parameter_is_an_error(tmp_path):
    model = adapted_model()
    with dq.Checkpointer(tmp_path, model, adamw(model), roles={"*.base.*": "omit"}) as ckpt:
        ckpt.save(1)
        with torch.no_grad():
            model[0].base.weight[0, 0] += 1
        with pytest.raises(StateError, match=r"model\.0\.base\.weight is not stored \(role 'omit'\), and has changed"):
            ckpt.save(2)


def test_adapters_are_loaded_only_into_a_model_with_the_same_base(tmp_path):
    model, _ = saved_run(tmp_path, roles={"*.base.*": "omit"})
    same, other = adapted_model(), adapted_model()
    assert dq.load_into(same, tmp_path) == []
    assert bits(same[0].a.weight) == bits(dq.load(tmp_path)["model"]["0.a.weight"])
    assert bits(base_of(same)) == bits(base_of(model))
    with torch.no_grad():
        other[2].base.bias[3] += 1
    with pytest.raises(StateError, match=r"2\.base\.bias is not stored"):
        dq.load_into(other, tmp_path)


def test_an_adapter_only_checkpoint_is_exported_without_its_base(tmp_path):
    saved_run(tmp_path / "run", roles={"*.base.*": "omit"})
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "-o", str(tmp_path / "adapter.safetensors")])
    assert result.exit_code == 0, result.output
    from safetensors.torch import load_file

    assert sorted(load_file(tmp_path / "adapter.safetensors")) == [
        "0.a.weight",
        "0.b.weight",
        "2.a.weight",
        "2.b.weight",
    ]


def test_trained_parameters_cannot_be_omitted(tmp_path):
    model = adapted_model()
    with pytest.raises(StateError, match=r"model\.0\.a\.weight has role 'omit', but it trains"):
        dq.Checkpointer(tmp_path, model, adamw(model), roles={"model.*": "omit"})
    with dq.Checkpointer(tmp_path, model, adamw(model), roles={"model.*": "omit", "*.[ab].weight": "weight"}) as ckpt:
        train(model, adamw(model))
        ckpt.save(1)


def test_only_tensors_of_modules_can_be_omitted(tmp_path):
    model = adapted_model()
    optimizer = adamw(model)
    train(model, optimizer)
    with (
        dq.Checkpointer(tmp_path, model, optimizer, roles={"optimizer.*": "omit"}) as ckpt,
        pytest.raises(StateError, match="is not a parameter or buffer of a module"),
    ):
        ckpt.save(1)


@pytest.mark.parametrize("write", [lambda p: p.detach()[0].add_(1), lambda p: p.data.add_(1)], ids=["in place", "data"])
def test_a_write_to_frozen_parameters_in_evaluate_is_an_error(tmp_path, write):
    model = adapted_model()

    def evaluate(model):
        write(model[0].base.weight)
        return loss(model)

    with (
        dq.Checkpointer(tmp_path, model, adamw(model), evaluate=evaluate) as ckpt,
        pytest.raises(EvaluateError, match=r"has changed the frozen parameter 0\.base\.weight"),
    ):
        ckpt.save(1)


def test_a_layer_that_is_parametrized_in_each_forward_pass_changes_no_frozen_parameter(tmp_path):
    class Adapted(nn.Module):  # as PEFT does it for target_parameters
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.change = nn.Parameter(torch.zeros(16, 16))

        def forward(self, inputs):
            adds = nn.Module()
            adds.forward = lambda weight: weight + self.change
            parametrize.register_parametrization(self.base, "weight", adds)
            found = self.base(inputs)
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
            self.base.weight.requires_grad_(False)
            return found

    model = Adapted()
    before = bits(model.base.weight)
    inputs = torch.randn(8, 16)
    with dq.Checkpointer(tmp_path, model, evaluate=lambda model: model(inputs).square().mean().item()) as ckpt:
        ckpt.save(1).result()
    assert bits(model.base.weight) == before


def test_a_frozen_embedding_that_renormalises_its_rows_is_scored_on_a_copy(tmp_path):
    model = nn.Sequential(nn.Embedding(300, 1000, max_norm=0.5).requires_grad_(False), nn.Linear(1000, 3))
    before = bits(model[0].weight)

    def evaluate(model):
        return model(torch.arange(10)).square().mean().item()

    with dq.Checkpointer(tmp_path, model, adamw(model), evaluate=evaluate) as ckpt:
        ckpt.save(1).result()
    assert bits(model[0].weight) == before


def test_the_file_of_frozen_parameters_is_deleted_with_the_last_checkpoint_that_needs_it(tmp_path):
    model = adapted_model()
    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2)) as ckpt:
        for step in range(1, 9):
            if step == 4:
                with torch.no_grad():
                    torch._foreach_mul_([p for p in model.parameters() if not p.requires_grad], 2)
            ckpt.save(step)
    (held,) = tmp_path.glob("frozen-*.dqc")  # the file of the old base is deleted
    assert bits(dq.load(tmp_path)["model"]["0.base.weight"]) == bits(model[0].base.weight)
    held.unlink()
    with pytest.raises(CheckpointError, match=held.name):
        dq.load(tmp_path)


def test_a_training_continues_after_the_file_of_frozen_parameters_was_deleted(tmp_path):
    model = adapted_model()
    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        ckpt.save(1).result()
        next(tmp_path.glob("frozen-*.dqc")).unlink()
        ckpt.save(2).result()
    assert bits(dq.load(tmp_path)["model"]["0.base.weight"]) == bits(model[0].base.weight)


def test_runs_with_frozen_parameters_are_branched_compacted_and_pruned(tmp_path):
    model, _ = saved_run(tmp_path / "run", saves=5, keep=dq.Keep(lossless_copy=True))
    run = WritableRun(tmp_path / "run")
    branch(run, run.file(5), tmp_path / "branch")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with run.locked():
        assert list(compact(run, 2)) == [1, 2, 3, 4, 5]
        prune(run, Retention(dq.Keep(last=2)))
    assert len(list(tmp_path.glob("run/frozen-*.dqc"))) == 1
    for folder in ("run", "branch", "copy"):
        result = CliRunner().invoke(app, ["verify", str(tmp_path / folder)])
        assert result.exit_code == 0, result.output
        assert bits(dict(dq.load(tmp_path / folder)["model"])) == bits(dict(model.state_dict()))


def test_damage_to_frozen_parameters_is_found(tmp_path):
    model, _ = saved_run(tmp_path, saves=2)
    (held,) = tmp_path.glob("frozen-*.dqc")
    data = bytearray(held.read_bytes())
    data[5000] ^= 1
    held.write_bytes(data)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert held.name in result.output
    # A model that has the same base does not need the file.
    other = adapted_model()
    with dq.Checkpointer(tmp_path, other, adamw(other)) as ckpt:
        assert ckpt.restore() == 2
    assert bits(base_of(other)) == bits(base_of(model))
    with torch.no_grad():
        other[0].base.weight.zero_()
    before = bits(other.state_dict())
    with dq.Checkpointer(tmp_path, other, adamw(other)) as ckpt, pytest.raises(CheckpointError, match=held.name):
        ckpt.restore()
    with pytest.raises(CheckpointError, match=held.name):
        dq.load_into(other, tmp_path)
    assert bits(other.state_dict()) == before
    result = CliRunner().invoke(app, ["verify", str(Run(tmp_path).path(2))])
    assert result.exit_code == 1
    run = Run(tmp_path)
    with pytest.raises(CheckpointError, match=held.name):
        branch(run, run.file(2), tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


@pytest.mark.parametrize("damage", [lambda data: data[5000:], lambda data: data[:5000] + b"?" + data[5001:]])
def test_a_save_finds_damage_to_frozen_parameters_and_the_next_one_writes_them_anew(tmp_path, damage):
    model, _ = saved_run(tmp_path, saves=2)
    (held,) = tmp_path.glob("frozen-*.dqc")
    held.write_bytes(damage(held.read_bytes()))
    optimizer = adamw(model)
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(keyframe_every=1)) as ckpt:
        with suppress(CheckpointError):  # because the contents of the truncated file are unknown
            ckpt.restore()
        saved = []
        for step in (3, 4, 5):
            with suppress(CheckpointError):  # the error of step 3, which the next call raises again
                saved.append(ckpt.save(step).result().step)
        assert saved[-1] == 5
    assert bits(dq.load(tmp_path, 5)["model"]["0.base.weight"]) == bits(model[0].base.weight)


def test_a_restore_undoes_writes_that_bypass_version_counters(tmp_path):
    model = adapted_model()
    before = bits(model[0].base.weight)
    with dq.Checkpointer(tmp_path, model, adamw(model)) as ckpt:
        ckpt.save(1)
        ckpt.save(2)
        model[0].base.weight.data[3, 5:6] += 1  # no value of the sample
        ckpt.restore()
    assert bits(model[0].base.weight) == before


def test_files_of_other_names_are_left_alone(tmp_path):
    for name in ("frozen-mine.dqc", "exact-best.dqc"):
        (tmp_path / name).write_text("mine")
    saved_run(tmp_path, saves=2, keep=dq.Keep(lossless_copy=True, last=1))
    assert (tmp_path / "frozen-mine.dqc").read_text() == (tmp_path / "exact-best.dqc").read_text() == "mine"


def test_both_decoders_read_frozen_and_omitted_parameters(tmp_path):
    model = adapted_model()
    saved_run(tmp_path, model=model, roles={"model.2.base.*": "omit"})
    header, tensors = decode(tmp_path, 4)
    kinds = {entry["name"]: entry["coding"]["kind"] for entry in header["tensors"]}
    assert kinds["model.0.base.weight"] == "frozen"
    assert kinds["model.2.base.weight"] == "omitted"
    assert tensors["model.0.base.weight"][2] == model[0].base.weight.detach().numpy().tobytes()
    assert "model.2.base.weight" not in tensors


def test_a_frozen_teacher_among_the_extras_is_written_once_too(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    torch.manual_seed(0)
    model, teacher = nn.Linear(64, 10), nn.Linear(64, 4500).requires_grad_(False)
    optimizer = adamw(model)
    with dq.Checkpointer(
        tmp_path, model, optimizer, extras={"teacher": teacher}, keep=dq.Keep(keyframe_every=1)
    ) as ckpt:
        for step in (1, 2):
            record = ckpt.save(step).result()
        wanted = copy.deepcopy(teacher.state_dict())
        nn.init.zeros_(teacher.weight)
        ckpt.restore()
    assert record.total.stored < 50_000
    assert bits(teacher.state_dict()) == bits(wanted)
    assert not caplog.text
