"""The Checkpointer: what a training loop saves comes back, bit for bit what was promised, whatever happened."""

import json
import logging
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import bits, model_of, named_state, train

import dynaquant as dq
from dynaquant.save.record import record_of
from dynaquant.search.quality import Quality
from dynaquant.state.flatten import flatten
from dynaquant.store import verifying
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run
from dynaquant.training.collect import collect


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def training_of(seed: int = 0, optimizer=adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = model_of()
    return model, optimizer(model)


KMEANS = {"configuration": dq.Configuration()}
LOSSLESS = {"quality": "lossless"}

EVERY_WAY = pytest.mark.parametrize("way", [{}, {"method": "published"}, KMEANS], ids=["grid", "published", "fixed"])
FIXED = pytest.mark.parametrize(
    "configuration", [dq.GridConfiguration(-80), dq.Configuration()], ids=["grid", "kmeans"]
)
WITH_EXACT_MOMENTS = pytest.mark.parametrize("way", [LOSSLESS, KMEANS], ids=["lossless", "kmeans"])


def loss_of(model: nn.Module) -> float:
    """A metric: the loss on every token."""
    return nn.functional.cross_entropy(model.eval()(torch.arange(40)).float(), torch.arange(40)).item()


def saved(folder, steps, seed=0, **options) -> list[dict]:
    """Trains and saves; what ``load`` must return for every step, taken from the files as they were written."""
    model, optimizer = training_of(seed)
    states = []
    with dq.Checkpointer(folder, model, optimizer, **options) as ckpt:
        for step in steps:
            train(model, optimizer)
            ckpt.save(step).result()
            states.append(bits(dq.load(folder, step)))
    return states


def damage(path) -> None:
    """Flips a bit at the end of the stream of the first tensor, in its coded levels."""
    content = bytearray(path.read_bytes())
    content[16 + CheckpointFile(path).header.entries[0].size - 20] ^= 1
    path.write_bytes(content)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# Save and restore


def test_random_number_generators_at_rest_take_no_room_but_in_the_first_file(tmp_path):
    saved(tmp_path, (1, 2))
    first, second = (
        {entry.name: entry.size for entry in CheckpointFile(file).header.entries if entry.name.startswith("rng.")}
        for file in sorted(tmp_path.glob("*.dqc"))
    )
    assert set(first) == set(second) >= {"rng.python.1", "rng.numpy.1", "rng.torch"}
    assert first["rng.python.1"] > 2000
    assert second["rng.python.1"] == second["rng.numpy.1"] == 0


@EVERY_WAY
@pytest.mark.parametrize("metric", [loss_of, lambda _: 1.0], ids=["loss", "all candidates alike"])
def test_the_restored_weights_are_the_evaluated_ones_and_the_rest_is_exact(tmp_path, way, metric):
    """But for moments and vectors, which the grid method quantizes: they are restored as they were stored."""
    model, optimizer = training_of()
    seen = []

    def evaluate(scored: nn.Module) -> float:
        seen.append(weights_of(scored))
        return metric(scored)

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, **way) as ckpt:
        for step in range(1, 4):
            train(model, optimizer, 3)
            original, optimizer_state = weights_of(model), bits(named_state(optimizer, model=model))
            seen.clear()
            record = ckpt.save(step).result()
            originals = len(seen) - len(record.trials)
            assert originals == (5 if step == 1 else 1)  # at first to see whether the metric repeats itself
            assert all(bits(weights) == bits(original) for weights in seen[:originals])
            tried = [trial.configuration for trial in record.trials]
            scored = seen[originals + tried.index(record.configuration)]
            with torch.no_grad():
                assert record.quality.original == metric(model)
                model.train()
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as other:
        assert other.restore() == 3
    restored = weights_of(model)
    assert bits(restored) == bits(scored)
    assert metric(model) == record.quality.restored
    assert bits(named_state(optimizer, model=model)) == bits(dq.load(tmp_path)["optimizer"])
    assert (bits(named_state(optimizer, model=model)) == optimizer_state) == bool(way)
    changed = {name for name in original if bits(original[name]) != bits(restored[name])}
    assert changed == ({"0.weight", "1.weight", "4.weight"} if way else set(original))


@WITH_EXACT_MOMENTS
def test_everything_that_has_a_state_comes_back(tmp_path, way):
    def build(seed: int):
        model, optimizer = training_of(seed)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
                    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
                ],
                [3],
            ),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=2),
            "shuffle": torch.Generator().manual_seed(seed),
            "augment": np.random.default_rng(seed),
            "twister": np.random.Generator(np.random.MT19937(seed)),
            "ema": torch.optim.swa_utils.AveragedModel(model),
        }

    def checkpointer_of(things) -> dq.Checkpointer:
        things = dict(things)
        return dq.Checkpointer(tmp_path, things.pop("model"), things.pop("optimizer"), extras=things, **way)

    def kept(things) -> tuple:
        state = collect(things)
        return bits(state if way == LOSSLESS else _exact(state))

    def advance(things) -> None:
        train(things["model"], things["optimizer"])
        things["scheduler"].step()
        things["plateau"].step(random.random())
        things["scaler"].scale(torch.ones(1))
        torch.rand(3, generator=things["shuffle"])
        things["augment"].random()
        things["twister"].normal()
        things["ema"].update_parameters(things["model"])
        np.random.rand()

    first, second = build(3), build(4)
    with checkpointer_of(first) as ckpt:
        for _ in range(5):
            advance(first)
        wanted = kept(first)
        ckpt.save(5)
    advance(first)
    assert kept(first) != wanted
    with checkpointer_of(second) as ckpt:
        assert ckpt.restore() == 5
        assert kept(second) == wanted


def _exact(state: dict) -> dict:
    """A state without its quantized weights."""
    _, tensors = flatten(state)
    quantized = [name for name, t in tensors.items() if name.startswith(("model.", "ema.")) and t.ndim >= 2]
    assert len(quantized) in (0, 3, 6)
    return {k: v for k, v in state.items() if k not in ("model", "ema")} | {
        name: tensor for name, tensor in tensors.items() if name not in quantized
    }


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
        lambda m: torch.optim.Adagrad(m.parameters()),
        lambda m: torch.optim.AdamW([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(m.parameters())]),
    ],
    ids=["AdamW", "Adam amsgrad", "SGD momentum", "SGD", "RMSprop", "Adagrad", "groups"],
)
@pytest.mark.parametrize("way", [{}, LOSSLESS, KMEANS], ids=["grid", "lossless", "kmeans"])
def test_training_goes_on_from_a_restore_the_same_way_every_time(tmp_path, optimizer, way):
    model, opt = training_of(0, optimizer)
    with dq.Checkpointer(tmp_path, model, opt, **way) as ckpt:
        train(model, opt, 5)
        ckpt.save(5).result()
        state = bits(dq.load(tmp_path)["optimizer"])
        assert state == bits(named_state(opt, model=model)) or not way
    ends = []
    for seed in (1, 2):
        model, opt = training_of(seed, optimizer)
        train(model, opt, seed)
        with dq.Checkpointer(tmp_path, model, opt, **way) as ckpt:
            assert ckpt.restore() == 5
            assert bits(named_state(opt, model=model)) == state
            train(model, opt, 5)
        ends.append(bits(collect({"model": model, "optimizer": opt})))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@FIXED
def test_models_of_other_element_types_come_back(tmp_path, dtype, configuration):
    model = model_of().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    evaluate = lambda m: seen.append(weights_of(m)) or 1.0  # noqa: E731
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, configuration=configuration) as ckpt:
        train(model, optimizer, 3)
        record = ckpt.save(1).result()
        state = bits(dq.load(tmp_path)["optimizer"])
        assert (state == bits(named_state(optimizer, model=model))) == (configuration == dq.Configuration())
        assert record.roles["weight"].ratio > 2
    other = model_of().to(dtype)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with dq.Checkpointer(tmp_path, other, optimizer) as ckpt:
        ckpt.restore()
    assert bits(weights_of(other)) == bits(seen[-1])
    assert bits(named_state(optimizer, model=other)) == state


class OddOptimizer(torch.optim.Optimizer):
    """One that nobody knows, with state of every kind under keys of every kind."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1, "names": ["a", None], "schedule": (1, 2.5, float("inf"))})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": self.state[p].get("step", 0) + 1,
                    ("odd", 1): torch.randn(()).to(p.dtype),
                    "rows": [p.detach().sum(dim=0), {"deep": p.detach() ** 2}],
                    "flag": True,
                    "nothing": None,
                    "bytes": b"\x00\xff",
                }
        self.state["global"] = {"count": torch.tensor(7, dtype=torch.int64), "nan": float("nan")}


def test_an_unknown_optimizer_comes_back_exactly(tmp_path):
    model, optimizer = training_of(0, lambda m: OddOptimizer(m.parameters()))
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        optimizer.step()
        optimizer.step()
        state = bits(named_state(optimizer, model=model))
        record = ckpt.save(2).result()
    assert "first_moment" not in record.roles
    assert bits(dq.load(tmp_path)["optimizer"]) == state
    model, optimizer = training_of(1, lambda m: OddOptimizer(m.parameters()))
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        ckpt.restore()
    assert bits(named_state(optimizer, model=model)) == state


def test_a_second_model_is_exact_unless_roles_say_otherwise(tmp_path):
    model, critic = model_of(), model_of()
    with dq.Checkpointer(tmp_path / "exact", model, extras={"critic": critic}, **KMEANS) as ckpt:
        ckpt.save(1).result()
    assert bits(dict(dq.load(tmp_path / "exact")["critic"])) == bits(weights_of(critic))
    roles = {"critic.[014].weight": "weight"}
    with dq.Checkpointer(tmp_path, model, extras={"critic": critic}, roles=roles, **KMEANS) as ckpt:
        record = ckpt.save(1).result()
    assert record.roles["weight"].raw == 2 * sum(p.numel() * 4 for p in model.parameters() if p.ndim > 1)
    assert record.roles["weight"].ratio > 3
    restored = model_of()
    with dq.Checkpointer(tmp_path, model_of(), extras={"critic": restored}) as ckpt:
        ckpt.restore()
    assert bits(weights_of(restored)) == bits(dict(dq.load(tmp_path)["critic"]))
    assert bits(weights_of(restored)["2.weight"]) == bits(weights_of(critic)["2.weight"])


# Which checkpoint is restored


def test_an_empty_run_restores_nothing(tmp_path):
    model, optimizer = training_of()
    before = bits(collect({"model": model, "optimizer": optimizer}))
    with dq.Checkpointer(tmp_path / "new", model, optimizer) as ckpt:
        assert ckpt.restore() is None
    assert bits(collect({"model": model, "optimizer": optimizer})) == before


def test_a_given_step_is_restored(tmp_path):
    states = saved(tmp_path, [1, 2, 3])
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step in (2, 1, 3):
            assert ckpt.restore(step=step) == step
            assert bits(dict(weights_of(model))) == bits(dict(dq.load(tmp_path, step)["model"]))
        with pytest.raises(dq.CheckpointError, match=r"there is no checkpoint of step 9 \(there are: 1, 2, 3\)"):
            ckpt.restore(step=9)
    assert len({repr(state) for state in states}) == 3


def test_the_newest_that_verifies_is_restored_and_the_others_are_named(tmp_path, caplog):
    saved(tmp_path, [1, 2, 3, 4, 5], keyframe_every=2)
    run = Run(tmp_path)
    damage(run.path(3))
    run.path(5).write_bytes(run.path(5).read_bytes()[:-1])
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt, caplog.at_level(logging.WARNING, "dynaquant"):
        assert ckpt.restore() == 2
    said = [str(error) for error in ckpt.skipped]
    assert len(said) == 3
    assert said[0] == f"{run.path(5)}: truncated, or damaged at its end"
    assert said[1].startswith(f"checkpoint step 4: {run.path(3)}: tensor ")  # step 4 is a delta against it
    assert said[2].startswith(f"{run.path(3)}: tensor ")
    assert [record.getMessage() for record in caplog.records] == [
        f"restored step 2; passed over {reason}" for reason in said
    ]


def test_every_file_that_was_passed_over_is_said_once(tmp_path):
    saved(tmp_path, [1, 2, 3, 4], keyframe_every=1)
    run = Run(tmp_path)
    for step in (2, 4):
        run.path(step).write_bytes(b"")
    damage(run.path(3))
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt:
        assert ckpt.restore() == 1
    assert sorted(str(error).partition(": ")[0] for error in ckpt.skipped) == [str(run.path(s)) for s in (2, 3, 4)]


def test_a_whole_newest_checkpoint_is_restored_without_a_word(tmp_path, caplog):
    saved(tmp_path, [1, 2])
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt, caplog.at_level(logging.WARNING, "dynaquant"):
        assert ckpt.restore() == 2
    assert ckpt.skipped == []
    assert caplog.records == []


def test_a_run_of_which_nothing_verifies_is_an_error_and_changes_nothing(tmp_path):
    saved(tmp_path, [1, 2], keyframe_every=1)
    run = Run(tmp_path)
    damage(run.path(1))
    run.path(2).write_bytes(b"")
    model, optimizer = training_of(1)
    before = bits(collect({"model": model, "optimizer": optimizer}))
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt, pytest.raises(dq.CheckpointError) as caught:
        ckpt.restore()
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}: no checkpoint of this run can be restored:\n  {run.path(2)}: ")
    assert f"\n  {run.path(1)}: tensor " in said
    assert "Nothing was changed." in said
    assert bits(collect({"model": model, "optimizer": optimizer})) == before


def test_training_goes_on_after_a_damaged_newest_checkpoint(tmp_path):
    saved(tmp_path, [1, 2, 3])
    damage(Run(tmp_path).path(3))
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() == 2
        train(model, optimizer)
        record = ckpt.save(3).result()
        assert record.parent == 2
        assert ckpt.restore() == 3
        assert ckpt.skipped == []


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, **LOSSLESS) as ckpt:
        for step in (1, 1, 2, 2, 3, 1):
            train(model, optimizer)
            record = ckpt.save(step).result()
            wanted = bits(named_state(optimizer, model=model))
            assert record.parent != step
            assert bits(dq.load(tmp_path, step)["optimizer"]) == wanted
        assert ckpt.restore() == 1
        for step in (1, 2, 3):
            dq.load(tmp_path, step)
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:012d}.dqc" for step in (1, 2, 3)]


def test_a_step_is_not_replaced_while_another_depends_on_it(tmp_path, monkeypatch):
    saved(tmp_path, [1, 2, 3])
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    recode = Run.recode

    def failing(*_):
        raise dq.CheckpointError("re-coding would change the values")

    monkeypatch.setattr(Run, "recode", failing)
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        ckpt.restore(step=1)
        with pytest.raises(dq.CheckpointError, match="step 2 was not replaced, as step 3 depends on it"):
            ckpt.save(2).result()
        with pytest.raises(dq.CheckpointError, match="step 2 was not replaced"):
            ckpt.wait()
        assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
        monkeypatch.setattr(Run, "recode", recode)
        ckpt.save(2).result()
    assert verifying.damage(Run(tmp_path), 3) is None


def test_training_goes_on_over_damaged_checkpoints_that_build_on_one_another(tmp_path):
    saved(tmp_path, [1, 2, 3])
    damage(Run(tmp_path).path(2))
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() == 1
        record = ckpt.save(2).result()
        assert [note[:18] for note in record.notes] == ["step 3 was damaged"]
        assert ckpt.save(3).result().notes == []
        assert ckpt.restore() == 3


def test_a_new_line_from_an_old_step_is_the_newest_and_the_old_line_stays(tmp_path):
    states = saved(tmp_path, [1, 2, 3, 4])
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer, **LOSSLESS) as ckpt:
        ckpt.restore(step=2)
        train(model, optimizer)
        record = ckpt.save(3).result()
        assert record.parent == 2
        wanted = bits(named_state(optimizer, model=model))
    for step in (1, 2, 4):
        assert bits(dq.load(tmp_path, step)) == states[step - 1]
    model, optimizer = training_of(2)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() == 3
        assert bits(named_state(optimizer, model=model)) == wanted
        assert [record.step for record in ckpt.records()] == [1, 2, 4, 3]


def test_chains_are_as_long_as_keyframe_every_says_across_restarts(tmp_path):
    model, optimizer = training_of()
    for start in (0, 5, 7):
        with dq.Checkpointer(tmp_path, model, optimizer, keyframe_every=3) as ckpt:
            ckpt.restore()
            for step in range(start, start + 5):
                train(model, optimizer)
                ckpt.save(step).result()
    run = Run(tmp_path)
    lengths = [len(run.chain(run.file(summary.step))) for summary in run.summaries()[0]]
    assert max(lengths) == 3
    assert lengths.count(1) <= 5


def test_retention_goes_on_in_a_new_process(tmp_path):
    model, optimizer = training_of()
    states = {}
    for start in (1, 4, 7):
        with dq.Checkpointer(tmp_path, model, optimizer, keep_last=2, keep_every=5) as ckpt:
            assert ckpt.restore() == (start - 1 or None)
            for step in range(start, start + 3):
                train(model, optimizer)
                ckpt.save(step).result()
                states[step] = bits(dq.load(tmp_path, step))
    assert [summary.step for summary in Run(tmp_path).summaries()[0]] == [5, 8, 9]
    for step in (5, 8, 9):
        assert bits(dq.load(tmp_path, step)) == states[step]


# Weights that do not change


@EVERY_WAY
def test_frozen_weights_are_stored_once(tmp_path, way):
    model, _ = training_of()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with dq.Checkpointer(tmp_path, model, optimizer, **way) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            assert ckpt.save(step).result().configuration is not None
    run = Run(tmp_path)
    sizes = [run.file(step).header.by_name["model.0.weight"].size for step in (1, 2, 3)]
    assert sizes[0] > 0
    assert sizes[1:] == [0, 0]
    hashes = {run.file(step).header.by_name["model.0.weight"].hash for step in (1, 2, 3)}
    assert len(hashes) == 1


@pytest.mark.parametrize("method", ["grid", "published"])
def test_frozen_weights_that_are_to_be_quantized_keep_their_values_whatever_is_found_for_the_others(tmp_path, method):
    model, _ = training_of()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    frozen, seen, configurations = bits(model[0].weight.detach()), [], []

    def evaluate(scored: nn.Module) -> float:
        seen.append(bits(scored[0].weight.detach()))
        return 1.0 if len(scored[1].weight.unique()) >= wanted else 2.0

    roles = {"model.0.weight": "weight"}
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method, roles=roles) as ckpt:
        for step, wanted in enumerate((2, 12, 40)):
            train(model, optimizer)
            configurations.append(ckpt.save(step).result().configuration)
            loaded = dq.load(tmp_path, step)["model"]
            assert len(loaded["1.weight"].unique()) >= wanted
            if step == 0:
                stored = bits(loaded["0.weight"])
                seen.clear()
            assert bits(loaded["0.weight"]) == stored != frozen
    assert len(set(configurations)) == 3
    assert set(seen) == {frozen, stored}
    assert seen.count(frozen) == 2  # that of the weights in training, once at each save


@EVERY_WAY
@pytest.mark.parametrize("evaluate", [None, loss_of], ids=["no metric", "metric"])
def test_saving_what_was_restored_changes_no_value_and_costs_almost_nothing(tmp_path, way, evaluate):
    saved(tmp_path, [1], evaluate=evaluate, **way)
    identities, sizes = [], []
    for step in (2, 3, 4):
        model, optimizer = training_of(step)
        with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, **way) as ckpt:
            ckpt.restore()
            record = ckpt.save(step).result()
        identities.append(record.identity)
        sizes.append(sum(size.stored for size in record.roles.values()))
    assert set(identities) == {Run(tmp_path).file(1).header.identity}
    assert sizes == [0, 0, 0]


# Errors


def test_a_failed_write_is_raised_once_at_the_next_save(tmp_path):
    model, optimizer = training_of()
    folder = tmp_path / "run"
    ckpt = dq.Checkpointer(folder, model, optimizer, **LOSSLESS)
    ckpt.save(1).result()
    shutil.move(folder, tmp_path / "away")
    failed = ckpt.save(2)
    with pytest.raises(dq.CheckpointError, match="is not there any more, so nothing was written"):
        ckpt.save(3)
    assert isinstance(failed.exception(), dq.CheckpointError)
    shutil.move(tmp_path / "away", folder)
    assert ckpt.save(3).result().step == 3
    ckpt.close()
    assert sorted(os.listdir(folder)) == ["step-000000000001.dqc", "step-000000000003.dqc"]
    assert bits(dq.load(folder)["optimizer"]) == bits(named_state(optimizer, model=model))


def test_a_failed_write_is_raised_once_at_close(tmp_path):
    folder = tmp_path / "run"
    ckpt = dq.Checkpointer(folder, *training_of())
    folder.rmdir()
    folder.write_text("a file where the folder was")
    ckpt.save(1)
    with pytest.raises(dq.CheckpointError, match="run is another folder"):
        ckpt.close()
    ckpt.close()
    folder.unlink()
    with dq.Checkpointer(folder, *training_of()) as ckpt:
        assert ckpt.restore() is None


def test_the_error_that_ends_training_is_not_hidden_by_that_of_a_write(tmp_path, caplog):
    folder = tmp_path / "run"

    def training() -> None:
        with dq.Checkpointer(folder, *training_of()) as ckpt:
            folder.rmdir()
            ckpt.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert "the last checkpoint could not be written" in caplog.text
    with dq.Checkpointer(folder, *training_of()):
        pass


def test_leaving_the_block_waits_for_the_last_write(tmp_path):
    with dq.Checkpointer(tmp_path, *training_of()) as ckpt:
        future = ckpt.save(1)
    assert future.done()
    assert dq.load(tmp_path, 1)


class Failing:
    """An evaluation that fails while it is told to, but not before it has drawn and changed modes."""

    def __init__(self) -> None:
        self.fails = True

    def __call__(self, model: nn.Module) -> float:
        model.eval()
        torch.rand(3)
        if self.fails:
            raise ArithmeticError("no score")
        return 1.0


@EVERY_WAY
def test_an_evaluation_that_fails_costs_no_checkpoint_and_leaves_training_as_before(tmp_path, way):
    model, optimizer = training_of()
    evaluate, configuration = Failing(), way.get("configuration")
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, **way) as ckpt:
        evaluate.fails = False
        ckpt.save(0).result()
        evaluate.fails = True
        train(model, optimizer)
        before = bits(collect({"model": model, "optimizer": optimizer}))
        record = ckpt.save(1).result()
        assert bits(collect({"model": model, "optimizer": optimizer})) == before
        assert all(module.training for module in model.modules())
        assert (record.configuration, record.quality) == (configuration, None)
        assert record.search == ("lossless" if configuration is None else "fixed")
        assert len(record.notes) == 1
        assert record.notes[0].startswith("evaluate failed (ArithmeticError: no score): ")
        exact = bits(dict(dq.load(tmp_path, 1)["model"])) == bits(weights_of(model))
        assert exact == (configuration is None)
        if way:
            assert bits(dq.load(tmp_path, 1)["optimizer"]) == bits(named_state(optimizer, model=model))
        evaluate.fails = False
        train(model, optimizer)
        after = ckpt.save(2).result()
        assert (after.quality.degradation, after.notes) == (0, [])
        assert after.search == ("fixed" if configuration else "neighbourhood" if way else "scale")
        assert configuration in (None, after.configuration)
    assert record == as_kept(tmp_path, record)


def as_kept(folder, returned: dq.Record) -> dq.Record:
    """The record that the run has kept of the same save, with the seconds that only ``save`` could tell."""
    kept = record_of(Run(folder).file(returned.step))
    return replace(kept, seconds=returned.seconds)


def test_weights_that_were_exact_once_are_quantized_at_the_next_save_and_restored_alike(tmp_path):
    model, optimizer = training_of()
    evaluate = Failing()
    evaluate.fails = False
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        sizes, states = [], []
        for step, evaluate.fails in enumerate((False, True, False)):
            record = ckpt.save(step).result()
            sizes.append(record.roles["weight"].stored)
            assert (record.configuration is None) == evaluate.fails
            train(model, optimizer)
            states.append(bits(dq.load(tmp_path, step)))
    assert sizes[1] > 3 * max(sizes[0], sizes[2])
    for step, state in enumerate(states):
        with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt:
            assert ckpt.restore(step) == step
            assert bits(dq.load(tmp_path, step)) == state


def only_restored(model: nn.Module, original: float, restored: float):
    """A metric that tells the weights in training from all others."""
    weights = bits(weights_of(model))
    return lambda scored: original if bits(weights_of(scored)) == weights else restored


@EVERY_WAY
@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_score_of_the_training_that_is_not_finite_does_not_keep_it_from_being_saved(tmp_path, score, way):
    model, optimizer = training_of()
    configuration = way.get("configuration")
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=lambda _: score, **way) as ckpt:
        record = ckpt.save(1).result()
        assert "the metric of the weights in training is not finite" in record.notes[-1]
        assert (record.configuration, record.quality, record.trials) == (configuration, None, [])
        assert record == as_kept(tmp_path, record)
    exact = bits(dict(dq.load(tmp_path)["model"])) == bits(weights_of(model))
    assert exact == (configuration is None)


@pytest.mark.parametrize("step", [2**63, 2**64, 10**400], ids=["2**63", "2**64", "10**400"])
def test_a_step_that_a_file_has_no_room_for_is_refused_before_anything_is_done(tmp_path, step):
    model, optimizer = training_of()
    called = []
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=lambda _: called.append(1) or 1.0) as ckpt:
        with pytest.raises(ValueError, match=r"step must be less than 2\*\*63"):
            ckpt.save(step)
        assert (called, os.listdir(tmp_path)) == ([], [])
        assert ckpt.save(2**63 - 1).result().step == 2**63 - 1
        assert ckpt.restore() == 2**63 - 1


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
@pytest.mark.parametrize("original", [1.0, 0.0])
@FIXED
def test_a_score_of_the_restored_weights_that_is_not_finite_is_in_the_record(tmp_path, original, score, configuration):
    model, optimizer = training_of()
    options = {"evaluate": only_restored(model, original, score), "configuration": configuration}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        record = ckpt.save(1).result()
        assert repr(record.quality) == repr(Quality(original, score, score))  # as text, in which NaN is itself
        assert record.notes[-1] == "the metric is not finite: the degradation of this checkpoint is unknown"
        assert repr(ckpt.records()[0].quality) == repr(record.quality)
        assert bits(ckpt.records()[0].trials[0].degradation) == bits(score)


@pytest.mark.parametrize("scores", [(1.0, float("nan")), (1.0, float("inf")), (0.0, 1e-9), (1.0, 1.0101)], ids=str)
@pytest.mark.parametrize("method", ["grid", "published"])
def test_weights_are_stored_exactly_when_no_candidate_is_good_enough(tmp_path, scores, method):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=only_restored(model, *scores), method=method) as ckpt:
        record = ckpt.save(1).result()
        assert (record.search, record.configuration, record.quality) == ("lossless", None, None)
        assert record.trials
        assert not any(trial.degradation <= 0.01 for trial in record.trials)
        assert bits(dict(dq.load(tmp_path)["model"])) == bits(weights_of(model))


@FIXED
def test_a_loss_that_was_zero_does_not_keep_a_checkpoint_from_being_saved(tmp_path, configuration):
    model, optimizer = training_of()
    options = {"evaluate": only_restored(model, 0.0, 0.5), "configuration": configuration}
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        assert ckpt.save(1).result().quality.degradation == float("inf")
        assert ckpt.records()[0].quality.degradation == float("inf")


@pytest.mark.parametrize("method", ["grid", "published"])
def test_candidates_on_which_evaluate_fails_are_not_good_enough(tmp_path, method):
    model, optimizer = training_of()

    def evaluate(scored: nn.Module) -> float:
        if len(scored[1].weight.unique()) < 10:
            raise ArithmeticError("too few levels")
        return 1.0

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, method=method) as ckpt:
        train(model, optimizer)
        record = ckpt.save(1).result()
    failed = [trial for trial in record.trials if trial.error]
    assert failed
    assert all(trial.error == "ArithmeticError: too few levels" for trial in failed)
    assert all(trial.degradation != trial.degradation for trial in failed)
    assert set(record.notes) == {"evaluate failed on a candidate (ArithmeticError: too few levels)"}
    assert record.configuration not in [trial.configuration for trial in failed]
    assert len(dq.load(tmp_path)["model"]["1.weight"].unique()) >= 10


def test_a_state_that_cannot_be_stored_is_named(tmp_path):
    class Loader:
        def state_dict(self):
            return {"position": 3, "source": object()}

        def load_state_dict(self, state):
            self.state = state

    with pytest.raises(dq.StateError, match=r"loader\.source: a value of type builtins\.object cannot be stored"):
        dq.Checkpointer(tmp_path, *training_of(), extras={"loader": Loader()})
    with pytest.raises(dq.StateError, match="loader: range has no state_dict"):
        dq.Checkpointer(tmp_path, *training_of(), extras={"loader": range(2)})
    with dq.Checkpointer(tmp_path, *training_of()):
        pass


@pytest.mark.parametrize("name", ["model", "optimizer", "rng", "classes"])
def test_names_that_are_taken_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"extras cannot be called {name}"):
        dq.Checkpointer(tmp_path, *training_of(), extras={name: model_of()})


@pytest.mark.parametrize("options", [{"every": 0}, {"keyframe_every": 0}, {"keep_last": 0}, {"keep_every": -1}])
def test_numbers_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="must be at least 1"):
        dq.Checkpointer(tmp_path, *training_of(), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluate": 0.3}, "evaluate must be a function of the model, not 0.3"),
        ({"extras": [1]}, "extras must be a dictionary of objects by name, not a list"),
        ({"configuration": "small"}, "configuration must be a Configuration or a GridConfiguration, not 'small'"),
    ],
)
def test_arguments_of_another_kind_are_refused(tmp_path, options, said):
    with pytest.raises(TypeError, match=said):
        dq.Checkpointer(tmp_path, *training_of(), **options)


@pytest.mark.parametrize("value", [-0.01, float("nan"), float("inf"), "1%", True])
def test_a_degradation_out_of_range_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match="max_degradation must be a number from 0 on"):
        dq.Checkpointer(tmp_path, *training_of(), max_degradation=value)
    with dq.Checkpointer(tmp_path, *training_of(), max_degradation=0) as ckpt:
        assert ckpt.max_degradation == 0
        with pytest.raises(ValueError, match="max_degradation must be a number from 0 on"):
            ckpt.max_degradation = value
        assert ckpt.max_degradation == 0


def test_a_configuration_is_refused_together_with_a_degradation_to_search_one_by(tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        dq.Checkpointer(tmp_path, *training_of(), configuration=dq.Configuration(), max_degradation=0.01)
    with dq.Checkpointer(tmp_path, *training_of()) as ckpt:
        assert ckpt.max_degradation == 0.01


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quality": "excellent"}, "quality must be one of lossless, high, balanced, small, not 'excellent'"),
        ({"method": "magic"}, "method must be one of grid, kmeans, published, not 'magic'"),
        ({"quality": "lossless", "method": "grid"}, "takes no max_degradation"),
        ({"quality": "lossless", "max_degradation": 0.1}, "takes no max_degradation"),
        (KMEANS | {"quality": "lossless"}, "takes no max_degradation"),
        (KMEANS | {"method": "grid"}, "a Configuration cannot be used with method 'grid'"),
        (
            {"configuration": dq.GridConfiguration(0), "method": "published"},
            "a GridConfiguration cannot be used with method",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(value),
)
def test_what_does_not_go_together_is_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        dq.Checkpointer(tmp_path, *training_of(), **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("quality", "allowed"), [("high", 0.001), ("balanced", 0.01), ("small", 0.05)])
def test_a_quality_is_a_degradation_that_may_be_given_and_changed(tmp_path, quality, allowed):
    with dq.Checkpointer(tmp_path, *training_of(), quality=quality) as ckpt:
        assert ckpt.max_degradation == allowed
        ckpt.max_degradation = 0.02
        assert ckpt.save(1).result().limit == 0.02
    with dq.Checkpointer(tmp_path, *training_of(), quality=quality, max_degradation=0.03) as ckpt:
        assert ckpt.max_degradation == 0.03


def test_a_lossless_save_searches_for_nothing(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, **LOSSLESS) as ckpt:
        for step in (1, 2):
            train(model, optimizer, 3)
            record = ckpt.save(step).result()
            assert (record.search, record.configuration, record.limit) == ("lossless", None, None)


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (1.0, ValueError), ("1", ValueError), (None, ValueError)]
)
def test_steps_are_integers_from_zero_on(tmp_path, step, error):
    with dq.Checkpointer(tmp_path, *training_of()) as ckpt:
        with pytest.raises(error):
            ckpt.save(step)
        assert ckpt.save(0).result().step == 0


def test_a_second_training_in_the_same_run_is_refused(tmp_path):
    said = "another Checkpointer, here or in another process, is writing to this run"
    with dq.Checkpointer(tmp_path, *training_of()), pytest.raises(dq.CheckpointError, match=said):
        dq.Checkpointer(tmp_path, *training_of())
    with dq.Checkpointer(tmp_path, *training_of()):
        pass


# A changed training


class Other(torch.optim.AdamW):
    pass


def resized(model: nn.Module) -> None:
    model[4] = nn.Linear(24, 41)


def deeper(model: nn.Module) -> None:
    model.append(nn.Linear(40, 40, bias=False))


def shallower(model: nn.Module) -> None:
    del model[2]


def halved(model: nn.Module) -> None:
    model[1].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (resized, ["model.4.weight was float32[40, 24] and is float32[41, 24]", "model.4.bias was float32[40]"]),
        (deeper, ["model.5.weight is not in it"]),
        (shallower, ["model.3.weight is not in it", "model.4.weight is in it, and the model has no such tensor"]),
        (halved, ["model.1.weight was float32[24, 24] and is bfloat16[24, 24]", "model.1.bias was"]),
    ],
)
def test_a_changed_model_is_refused_and_nothing_is_changed(tmp_path, change, said):
    saved(tmp_path, [1, 2])
    model = model_of()
    change(model)
    optimizer = adamw(model)
    assert_refused(tmp_path, model, optimizer, {}, said)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            ["optimizer was torch.optim.adamw.AdamW and is torch.optim.sgd.SGD"],
        ),
        (lambda m: Other(m.parameters()), [f"optimizer was torch.optim.adamw.AdamW and is {Other.__module__}.Other"]),
        (
            lambda m: torch.optim.AdamW(list(m.parameters())[:5]),
            ["optimizer had the parameter model.4.weight, which it does not have now"],
        ),
        (lambda _: None, ["it holds 'optimizer', which was not given"]),
    ],
    ids=["class", "subclass", "fewer", "none"],
)
def test_a_changed_optimizer_is_refused_and_nothing_is_changed(tmp_path, build, said):
    saved(tmp_path, [1, 2])
    model = model_of()
    assert_refused(tmp_path, model, build(model), {}, said)


def test_other_extras_are_refused_and_nothing_is_changed(tmp_path):
    saved(tmp_path, [1], extras={"shuffle": torch.Generator()})
    model = model_of()
    said = ["it holds no 'augment'", "it holds 'shuffle', which was not given"]
    assert_refused(tmp_path, model, adamw(model), {"augment": torch.Generator()}, said)


class Faulty(nn.Linear):
    """A module with a mistake in its own code, while it is ``wrong``."""

    wrong = False

    def state_dict(self, *arguments, **options):
        if self.wrong:
            raise RuntimeError("a mistake of the user's")
        return super().state_dict(*arguments, **options)


class FaultyOptimizer(torch.optim.SGD):
    wrong = False

    def state_dict(self):
        if self.wrong:
            raise KeyError("a mistake of the user's")
        return super().state_dict()


class FaultyLoader:
    wrong = False

    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, _state):
        if self.wrong:
            raise ValueError("a mistake of the user's")


@pytest.mark.parametrize("which", ["model", "optimizer", "critic", "loader"])
def test_an_error_of_an_objects_own_is_raised_as_it_is_and_no_checkpoint_counts_as_damaged(tmp_path, which):
    model = Faulty(4, 4)
    optimizer = FaultyOptimizer(model.parameters(), lr=0.1)
    extras = {"critic": Faulty(4, 4), "loader": FaultyLoader()}
    objects = {"model": model, "optimizer": optimizer, **extras}
    with dq.Checkpointer(tmp_path, model, optimizer, extras=extras, keep_last=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step).result()
        objects[which].wrong = True
        with pytest.raises((RuntimeError, KeyError, ValueError), match="a mistake of the user's"):
            ckpt.restore()
        assert ckpt.skipped == []
        objects[which].wrong = False
        ckpt.save(3).result()
        assert ckpt.restore() == 3
    assert os.listdir(tmp_path) == ["step-000000000003.dqc"]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (torch.Generator(), np.random.default_rng(1)),
        (np.random.default_rng(1), torch.Generator()),
        (np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))),
    ],
    ids=["torch numpy", "numpy torch", "PCG64 MT19937"],
)
def test_another_kind_of_generator_is_refused_and_nothing_is_changed(tmp_path, was, now):
    saved(tmp_path, [1], extras={"shuffle": was})
    model = model_of()
    assert_refused(tmp_path, model, adamw(model), {"shuffle": now}, ["shuffle"])


def assert_refused(folder, model, optimizer, extras, said) -> None:
    things = {"model": model, **({"optimizer": optimizer} if optimizer else {}), **extras}
    before = bits(collect(things))
    with dq.Checkpointer(folder, model, optimizer, extras=extras) as ckpt:
        for step in (None, 1):
            with pytest.raises(dq.StateError) as caught:
                ckpt.restore(step)
            assert "does not fit the objects to restore" in str(caught.value)
            for words in said:
                assert words in str(caught.value)
            assert bits(collect(things)) == before


# When to save


def test_due_is_the_next_multiple_since_the_last_checkpoint_or_beyond(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, every=10) as ckpt:
        assert [step for step in range(0, 22) if ckpt.due(step)] == list(range(10, 22))
        ckpt.save(12)
        assert [step for step in range(0, 32) if ckpt.due(step)] == list(range(20, 32))
    with dq.Checkpointer(tmp_path, model, optimizer, every=10) as ckpt:
        ckpt.restore()
        assert not ckpt.due(19)
        assert ckpt.due(20)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt, pytest.raises(ValueError, match="every=steps"):
        ckpt.due(10)


# Records and gradients


@EVERY_WAY
@pytest.mark.parametrize("evaluate", [None, loss_of], ids=["no metric", "metric"])
def test_the_run_keeps_the_records_that_save_returned(tmp_path, way, evaluate):
    model, optimizer = training_of()
    returned, configuration = [], way.get("configuration")
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, every=1, **way) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            returned.append(ckpt.save(step).result())
        kept = ckpt.records()
    for record in returned:
        assert record.seconds.pop("write") > 0
        assert set(record.seconds) == {"wait", "capture", "search"}
        assert all(seconds >= 0 for seconds in record.seconds.values())
        assert record.configuration == configuration or configuration is None
        assert (record.search == "fixed") == (configuration is not None)
        assert record.judged_by == ("evaluate" if evaluate else "fisher distortion" if configuration is None else None)
        assert record.limit == (None if configuration else 0.01)
        assert (record.quality is not None) == (evaluate is not None)
        assert (record.configuration in [trial.configuration for trial in record.trials]) == bool(record.trials)
        assert record.interval == 1
    assert kept == returned
    kept = [record.to_json() for record in kept]
    assert json.loads(json.dumps(kept)) == kept
    assert [record["parent"] for record in kept] == [None, 1, 2]
    total = {"raw": 0, "stored": 0}
    for size in kept[0]["roles"].values():
        total = {key: total[key] + size[key] for key in total}
    assert total["raw"] == kept[0]["total"]["raw"]
    assert total["stored"] < kept[0]["total"]["stored"] == os.path.getsize(Run(tmp_path).path(1))


def test_protection_uses_the_gradients_of_the_steps_before(tmp_path):
    protected = {}
    for seen in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(100, 100, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with dq.Checkpointer(tmp_path / str(seen), model, optimizer, **KMEANS) as ckpt:
            inputs = torch.zeros(4, 100)
            inputs[:, 7] = 1e3  # only the weights of this column have gradients
            if seen:
                model(inputs).sum().backward()
                optimizer.step()
            record = ckpt.save(1).result()
        assert record.notes == (
            [] if seen else ["no gradients were recorded before this save: magnitude stood in for sensitivity"]
        )
        restored = dq.load(tmp_path / str(seen))["model"]["weight"]
        protected[seen] = (restored[:, 7] == model.weight.detach()[:, 7].bfloat16().float()).sum()
    assert protected[True] >= 20
    assert protected[False] < 5


def test_magnitude_alone_needs_no_gradients_and_no_note(tmp_path):
    model, optimizer = training_of()
    configuration = dq.Configuration(protection_metric="magnitude")
    with dq.Checkpointer(tmp_path, model, optimizer, configuration=configuration) as ckpt:
        assert ckpt.save(1).result().notes == []
        assert not optimizer._optimizer_step_pre_hooks


def test_the_optimizer_is_let_go_at_close(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer):
        assert optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_roles_can_be_overridden(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, roles={"model.4.*": "exact"}) as ckpt:
        ckpt.save(1)
    restored = dq.load(tmp_path)["model"]
    assert bits(restored["4.weight"]) == bits(model.state_dict()["4.weight"])
    assert bits(restored["1.weight"]) != bits(model.state_dict()["1.weight"])


@WITH_EXACT_MOMENTS
def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path, way):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, **way) as ckpt:
        for step in range(1, 6):
            train(model, optimizer)
            wanted = bits(named_state(optimizer, model=model)), bits(weights_of(model)["2.weight"])
            future = ckpt.save(step)
            with torch.no_grad():
                for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                    tensor.add_(1.0)
            future.result()
            state = dq.load(tmp_path, step)
            assert (bits(state["optimizer"]), bits(state["model"]["2.weight"])) == wanted


# Reading without a training


def test_load_takes_the_newest_or_a_given_step_and_says_what_is_wrong(tmp_path):
    with pytest.raises(dq.CheckpointError, match="there are no checkpoints here"):
        dq.load(tmp_path)
    states = saved(tmp_path, [1, 2])
    assert bits(dq.load(tmp_path)) == states[1]
    assert bits(dq.load(tmp_path, 1)) == states[0]
    assert set(dq.load(tmp_path)) == {"model", "optimizer", "rng", "classes", "parameters"}
    damage(Run(tmp_path).path(2))
    with pytest.raises(dq.CheckpointError, match=r"step-000000000002\.dqc: tensor "):
        dq.load(tmp_path)


def test_a_deleted_ancestor_makes_the_next_checkpoint_a_keyframe(tmp_path):
    saved(tmp_path, [1, 2])
    Run(tmp_path).path(1).unlink()
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        with pytest.raises(dq.CheckpointError, match="no checkpoint of this run can be restored"):
            ckpt.restore()
        assert ckpt.save(3).result().keyframe
    saved(tmp_path / "open", [])
    with dq.Checkpointer(tmp_path / "open", model, optimizer) as ckpt:
        for step in (1, 2):
            train(model, optimizer)
            ckpt.save(step).result()
        Run(tmp_path / "open").path(1).unlink()
        assert ckpt.save(3).result().keyframe
    assert dq.load(tmp_path / "open", 3)


def test_retention_never_takes_the_last_checkpoint_that_loads(tmp_path):
    saved(tmp_path, [1, 2])
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer, keep_last=2) as ckpt:
        assert ckpt.restore() == 2
        damage(Run(tmp_path).path(2))
        train(model, optimizer)
        assert ckpt.save(3).result().notes
    with dq.Checkpointer(tmp_path, *training_of(2)) as ckpt:
        assert ckpt.restore() == 1


def test_the_record_is_that_of_the_file_with_keep_last_too(tmp_path):
    model, optimizer = training_of(0)
    with dq.Checkpointer(tmp_path, model, optimizer, keep_last=1) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            record = ckpt.save(step).result()
            assert (record.keyframe, record.total.stored) == (True, Run(tmp_path).path(step).stat().st_size)


def test_a_closed_checkpointer_says_so(tmp_path):
    ckpt = dq.Checkpointer(tmp_path, model_of())
    ckpt.close()
    for call in (ckpt.restore, lambda: ckpt.save(1)):
        with pytest.raises(ValueError, match="has been closed"):
            call()


def test_good_checkpoints_outlive_the_damaged_ones_that_restore_passed_over(tmp_path):
    saved(tmp_path, [1, 2, 3, 4, 5], keyframe_every=1)
    for step in (4, 5):
        damage(Run(tmp_path).path(step))
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer, keep_last=2, keyframe_every=1) as ckpt:
        assert ckpt.restore() == 3
        train(model, optimizer)
        ckpt.save(6).result()
    assert dq.load(tmp_path, 3)
    assert dq.load(tmp_path, 6)
    with pytest.raises(dq.CheckpointError, match="there is no checkpoint of step 2"):
        dq.load(tmp_path, 2)


def test_saving_into_a_run_that_was_not_restored_is_warned_of(tmp_path, caplog):
    saved(tmp_path, [1, 2])
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt, caplog.at_level(logging.WARNING, "dynaquant"):
        ckpt.save(7)
    assert "holds 2 checkpoints, but none was restored" in caplog.text


@EVERY_WAY
def test_a_metric_that_is_no_number_is_said(tmp_path, way):
    says = "ValueError: evaluate returned 'bad'; it must return one number"
    with dq.Checkpointer(tmp_path, *training_of(), evaluate=lambda _: "bad", **way) as ckpt:
        with pytest.raises(dq.EvaluateError, match=says):
            ckpt.save(1)
        assert list(tmp_path.glob("*.dqc")) == []


def test_a_wrong_pattern_is_an_error_before_training(tmp_path):
    with pytest.raises(dq.StateError, match="matches no tensor"):
        dq.Checkpointer(tmp_path, *training_of(), roles={"nope*": "exact"})


# Training is not disturbed


def trained_with_randomness(folder=None) -> tuple[list[float], tuple, list[dq.Record]]:
    """A training that draws on every generator: its losses, its state at the end, and what was saved on the way."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    things = {"model": model, "optimizer": optimizer, "order": torch.Generator().manual_seed(5)}

    def loss(model: nn.Module, generator: torch.Generator | None = None) -> Tensor:
        inputs = torch.randn(16, 6, generator=generator) + random.random() * torch.from_numpy(np.random.randn(16, 6))
        return (model(inputs.float()) - inputs.float().flip(1)).square().mean()

    def evaluate(model: nn.Module) -> float:
        model.train()  # dropout draws, and the statistics of the batch norm move
        random.gauss(0, 1)
        return loss(model).item()

    losses, saves = [], []
    ckpt = folder and dq.Checkpointer(
        folder, model, optimizer, extras={"order": things["order"]}, evaluate=evaluate, every=2
    )
    for step in range(1, 13):
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        found = loss(model, things["order"])
        found.backward()
        if ckpt and ckpt.due(step):  # gradients are there, and must stay
            saves.append(ckpt.save(step))
        optimizer.step()
        losses.append(found.item())
        if ckpt and step == 7:
            saves.append(ckpt.save(step))
    if ckpt:
        ckpt.close()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    return losses, bits((collect(things), gradients, modes)), [save.result() for save in saves]


def test_training_takes_bit_identical_steps_with_and_without_checkpoints(tmp_path):
    with_saves, without = trained_with_randomness(tmp_path), trained_with_randomness()
    assert [record.step for record in with_saves[2]] == [2, 4, 6, 7, 8, 10, 12]
    assert all(record.trials and record.judged_by == "evaluate" for record in with_saves[2])
    assert with_saves[0] == without[0]
    assert with_saves[1] == without[1]
