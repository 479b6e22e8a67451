"""What the saves of ordinary trainings spend on a metric that is one plain function, everything counted."""

import statistics

import pytest
import torch
from ordinary_trainings import OPTIMIZERS, TRAININGS, loss_on, small_mlp, steps

import dynaquant as dq


def spent_by(folder, training_of, optimizer_of, before: int) -> list[int]:
    """Returns how often each of six saves evaluates. before: steps to the first one."""
    torch.manual_seed(0)
    model, inputs, targets = training_of()
    optimizer = optimizer_of(model.parameters())
    evaluate, calls, spent = loss_on(inputs, targets), [], []

    def counted(scored: torch.nn.Module) -> float:
        calls.append(scored)
        return evaluate(scored)

    with dq.Checkpointer(folder, model, optimizer, evaluate=counted, keep=dq.Keep(last=1)) as ckpt:
        steps(model, optimizer, before, inputs, targets)
        for step in range(6):
            calls.clear()
            record = ckpt.save(step).result()
            assert record.equivalents == len(calls)
            assert record.search == "scale"
            spent.append(len(calls))
            steps(model, optimizer, 5, inputs, targets)
    return spent


def test_a_record_says_what_its_save_has_spent(tmp_path):
    spent_by(tmp_path, small_mlp, torch.optim.AdamW, 20)


@pytest.mark.slow
def test_a_first_save_takes_six_evaluations_at_the_median_and_later_ones_three(tmp_path):
    """A single training says little: which evaluations a search needs depends on the last bits of the processor."""
    (trainings,), (optimizers,) = (mark.args[1:] for mark in (TRAININGS.mark, OPTIMIZERS.mark))
    spent = [
        spent_by(tmp_path / f"{training_of.__name__}-{number}-{before}", training_of, optimizer_of, before)
        for training_of in trainings
        for number, optimizer_of in enumerate(optimizers)
        for before in (20, 120)
    ]
    assert max(map(max, spent[::2])) <= 10  # after 20 steps
    # At a constant rate the budget allows little, and predictions of the first scale are far off.
    assert statistics.median(first for first, *_ in spent) <= 6
    assert statistics.median(each for _, *later in spent for each in later) <= 3
