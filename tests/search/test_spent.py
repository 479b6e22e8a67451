"""What the saves of ordinary trainings spend on a metric that is one plain function, everything counted."""

import statistics

import pytest
import torch
from ordinary_trainings import OPTIMIZERS, TRAININGS, loss_on, steps

import dynaquant as dq


@pytest.mark.parametrize("before", [20, 120])
@OPTIMIZERS
@TRAININGS
def test_a_first_save_takes_seven_evaluations_at_most_and_later_ones_four_at_the_median(
    tmp_path, training_of, optimizer_of, before
):
    torch.manual_seed(0)
    model, inputs, targets = training_of()
    optimizer = optimizer_of(model.parameters())
    evaluate, calls = loss_on(inputs, targets), []

    def counted(scored: torch.nn.Module) -> float:
        calls.append(scored)
        return evaluate(scored)

    spent = []
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=counted, keep=dq.Keep(last=1)) as ckpt:
        steps(model, optimizer, before, inputs, targets)
        for step in range(6):
            calls.clear()
            record = ckpt.save(step).result()
            assert record.equivalents == len(calls)
            assert record.search == "scale"
            spent.append(len(calls))
            steps(model, optimizer, 5, inputs, targets)
    # At a constant rate the budget allows little, and predictions of the first scale are far off.
    assert spent[0] <= 7
    assert statistics.median(spent[1:]) <= 4
