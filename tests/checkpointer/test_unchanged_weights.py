"""Weights that do not change are stored once and keep their values."""

from dataclasses import replace

import pytest
import torch
from small_runs import EVERY_WAY, loss_of, saved, training_of
from torch import nn
from training import bits, train

import dynaquant as dq
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.saving.presets import BALANCED, PRESETS
from dynaquant.store.run import Run


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
def test_quantized_frozen_weights_keep_their_values_when_the_configuration_changes(tmp_path, method, monkeypatch):
    monkeypatch.setitem(PRESETS, "balanced", replace(BALANCED, step_limits=LOOSEST_LIMITS))  # grids with few levels
    model, _ = training_of()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    frozen, seen, configurations = bits(model[0].weight.detach()), [], []

    def evaluate(scored: nn.Module) -> float:
        seen.append(bits(scored[0].weight.detach()))
        level = 1e-5 * float(scored[1].weight.sum())  # equal numbers would be those of a coarse metric
        return level + (1.0 if len(scored[1].weight.unique()) >= wanted else 2.0)

    roles = {"model.0.weight": "weight"}
    with dq.Checkpointer(
        tmp_path, model, optimizer, evaluate=evaluate, quality=dq.Quality(method=method), roles=roles
    ) as ckpt:
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
    assert seen.count(frozen) == 2  # for the weights in training, once at each save


@EVERY_WAY
@pytest.mark.parametrize("evaluate", [None, loss_of], ids=["no metric", "metric"])
def test_saving_right_after_a_restore_changes_no_value_and_takes_few_bytes(tmp_path, way, evaluate):
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
    # A dropped first moment is written again, as zeros, where the lowest power of its second moment is not used.
    assert max(sizes) <= 12
