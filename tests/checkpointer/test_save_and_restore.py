"""A restore returns the stored state: weights as they were evaluated, all else bit for bit."""

import random

import numpy as np
import pytest
import torch
from small_runs import (
    EVERY_WAY,
    FIXED,
    LOSSLESS,
    PUBLISHED,
    WITH_EXACT_MOMENTS,
    adamw,
    loss_of,
    saved,
    training_of,
    weights_of,
)
from torch import nn
from training import bits, model_of, named_state, train

import dynaquant as dq
from dynaquant.state.flatten import flatten
from dynaquant.store.container import CheckpointFile
from dynaquant.training.collect import collect


def test_unchanged_generators_take_bytes_only_in_the_first_file(tmp_path):
    saved(tmp_path, (1, 2))
    first, second = (
        {entry.name: entry.size for entry in CheckpointFile(file).header.entries if entry.name.startswith("rng.")}
        for file in sorted(tmp_path.glob("*.dqc"))
    )
    assert set(first) == set(second) >= {"rng.python.1", "rng.numpy.1", "rng.torch"}
    assert first["rng.python.1"] > 2000
    assert second["rng.python.1"] == second["rng.numpy.1"] == 0


def destroyed(model: nn.Module) -> bool:
    """Whether all matrices are zero, as in the model that shows whether a metric sees weights."""
    return not any(parameter.any() for parameter in model.parameters() if parameter.dim() > 1)


def alike(model: nn.Module) -> float:
    return 2.0 if destroyed(model) else 1.0


@EVERY_WAY
@pytest.mark.parametrize("metric", [loss_of, alike], ids=["loss", "all candidates alike"])
def test_restored_weights_are_the_evaluated_ones_and_all_else_is_exact(tmp_path, way, metric):
    """Exceptions are moments and vectors with the grid method: they are quantized."""
    model, optimizer = training_of()
    seen = []

    def evaluate(scored: nn.Module) -> float:
        if not destroyed(scored):
            seen.append(weights_of(scored))
        return metric(scored)

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, **way) as ckpt:
        for step in range(1, 4):
            train(model, optimizer, 3)
            original, optimizer_state = weights_of(model), bits(named_state(optimizer, model=model))
            seen.clear()
            record = ckpt.save(step).result()
            originals = len(seen) - len(record.trials)
            # The first save checks whether the metric is deterministic.
            assert originals == (1 if step > 1 else 2 if metric is loss_of else 5)
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
def test_all_objects_with_a_state_are_restored(tmp_path, way):
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
@pytest.mark.parametrize("way", [{}, LOSSLESS, PUBLISHED], ids=["grid", "lossless", "published"])
def test_training_after_a_restore_is_the_same_every_time(tmp_path, optimizer, way):
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


MEASURED_RATIO = {
    (dq.GridConfiguration, torch.bfloat16): 10.1,
    (dq.GridConfiguration, torch.float16): 10.0,
    (dq.GridConfiguration, torch.float64): 40.1,
    (dq.Configuration, torch.bfloat16): 2.40,
    (dq.Configuration, torch.float16): 2.40,
    (dq.Configuration, torch.float64): 9.62,
}
"""Measured compression ratios of the weights. A test fails below 70 % of them."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@FIXED
def test_models_of_other_dtypes_are_restored(tmp_path, dtype, configuration):
    model = model_of().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    evaluate = lambda m: seen.append(weights_of(m)) or 1.0  # noqa: E731
    with dq.Checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(configuration=configuration)
    ) as ckpt:
        train(model, optimizer, 3)
        record = ckpt.save(1).result()
        state = bits(dq.load(tmp_path)["optimizer"])
        assert (state == bits(named_state(optimizer, model=model))) == (configuration == dq.Configuration())
        measured = MEASURED_RATIO[type(configuration), dtype]
        assert record.roles["weight"].ratio > 0.7 * measured
    other = model_of().to(dtype)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with dq.Checkpointer(tmp_path, other, optimizer) as ckpt:
        ckpt.restore()
    assert bits(weights_of(other)) == bits(seen[-1])
    assert bits(named_state(optimizer, model=other)) == state


class OddOptimizer(torch.optim.Optimizer):
    """An optimizer outside ``torch.optim``, with values and keys of many types in its state."""

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


def test_an_unknown_optimizer_is_restored_exactly(tmp_path):
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


def test_a_model_among_the_extras_is_exact_unless_roles_say_otherwise(tmp_path):
    model, critic = model_of(), model_of()
    with dq.Checkpointer(tmp_path / "exact", model, extras={"critic": critic}, **PUBLISHED) as ckpt:
        ckpt.save(1).result()
    assert bits(dict(dq.load(tmp_path / "exact")["critic"])) == bits(weights_of(critic))
    roles = {"critic.[014].weight": "weight"}
    with dq.Checkpointer(tmp_path, model, extras={"critic": critic}, roles=roles, **PUBLISHED) as ckpt:
        record = ckpt.save(1).result()
    assert record.roles["weight"].raw == 2 * sum(p.numel() * 4 for p in model.parameters() if p.ndim > 1)
    assert record.roles["weight"].ratio > 0.7 * 4.78  # as measured
    restored = model_of()
    with dq.Checkpointer(tmp_path, model_of(), extras={"critic": restored}) as ckpt:
        ckpt.restore()
    assert bits(weights_of(restored)) == bits(dict(dq.load(tmp_path)["critic"]))
    assert bits(weights_of(restored)["2.weight"]) == bits(weights_of(critic)["2.weight"])


def test_roles_can_be_overridden(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, roles={"model.4.*": "exact"}) as ckpt:
        ckpt.save(1)
    restored = dq.load(tmp_path)["model"]
    assert bits(restored["4.weight"]) == bits(model.state_dict()["4.weight"])
    assert bits(restored["1.weight"]) != bits(model.state_dict()["1.weight"])


def test_a_training_is_not_restored_in_inference_mode_and_a_model_alone_is(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with dq.Checkpointer(tmp_path / "training", model, optimizer) as checkpointer:
        checkpointer.save(1).result()
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
            checkpointer.restore()
        with torch.inference_mode():
            assert checkpointer.restore(only="model") == 1
        assert checkpointer.restore() == 1
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with dq.Checkpointer(tmp_path / "model", model) as checkpointer:
        checkpointer.save(1).result()
        with torch.inference_mode():
            assert checkpointer.restore() == 1
