"""``due``, and the content of records."""

import json
import os

import pytest
import torch
from small_runs import EVERY_WAY, PUBLISHED, loss_of, training_of
from torch import nn
from training import train

import dynaquant as dq
from dynaquant.store.run import Run


def test_a_checkpoint_is_due_from_the_next_multiple_of_every(tmp_path):
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


@EVERY_WAY
@pytest.mark.parametrize("evaluate", [None, loss_of], ids=["no metric", "metric"])
def test_the_run_keeps_the_records_that_save_returned(tmp_path, way, evaluate):
    model, optimizer = training_of()
    returned, configuration = [], way.get("quality", dq.Quality()).configuration
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
        # At a constant learning rate, a quarter of the budget; the published methods have none.
        assert record.limit == (None if configuration else 0.01 if way else 0.005 / 4)
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


def test_outliers_are_chosen_by_the_gradients_of_the_steps_before(tmp_path):
    protected = {}
    for seen in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(100, 100, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with dq.Checkpointer(tmp_path / str(seen), model, optimizer, **PUBLISHED) as ckpt:
            inputs = torch.zeros(4, 100)
            inputs[:, 7] = 1e3  # only the weights of this column have gradients
            if seen:
                model(inputs).sum().backward()
                optimizer.step()
            record = ckpt.save(1).result()
        assert record.notes == (
            []
            if seen
            else ["no gradients were recorded before this save: weight magnitudes were used in place of sensitivity"]
        )
        restored = dq.load(tmp_path / str(seen))["model"]["weight"]
        protected[seen] = (restored[:, 7] == model.weight.detach()[:, 7].bfloat16().float()).sum()
    assert protected[True] >= 20
    assert protected[False] < 5


def test_magnitude_metrics_need_no_gradients_and_give_no_note(tmp_path):
    model, optimizer = training_of()
    configuration = dq.Configuration(protection_metric="magnitude")
    with dq.Checkpointer(tmp_path, model, optimizer, quality=dq.Quality(configuration=configuration)) as ckpt:
        assert ckpt.save(1).result().notes == []
        recorders = [
            hook for hook in optimizer._optimizer_step_pre_hooks.values() if "Updates" not in hook.__qualname__
        ]
        assert not recorders


def test_close_removes_the_hooks_of_the_optimizer(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer):
        assert optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
