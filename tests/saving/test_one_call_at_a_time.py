"""A Checkpointer runs one call at a time: calls from ``evaluate`` and from other threads are refused."""

import threading

import pytest
from torch import nn
from watched_training import Training

from dynaquant.store.run import Run


@pytest.mark.parametrize("name", ["save", "restore", "close"])
@pytest.mark.parametrize("caught", [False, True])
def test_a_call_from_inside_evaluate_is_refused_and_nothing_is_saved(tmp_path, name, caught):
    training = Training()
    calls = {"save": lambda: ckpt.save(7), "restore": lambda: ckpt.restore(), "close": lambda: ckpt.close()}  # noqa: PLW0108
    inside = []

    def evaluate(model: nn.Module) -> float:
        if inside:
            try:
                inside[0]()
            except RuntimeError:
                if not caught:
                    raise
        return training.evaluate(model)

    with training.checkpointer(tmp_path, evaluate=evaluate) as ckpt:
        training.step()
        ckpt.save(1)
        before = training.everything()
        inside.append(calls[name])
        with pytest.raises(RuntimeError, match=f"{name} was called while save of the same Checkpointer was running"):
            ckpt.save(2)
        inside.clear()
        assert training.everything() == before
        assert [record.step for record in ckpt.records()] == [1]
        ckpt.save(3)
    assert Run(tmp_path).steps() == [1, 3]


@pytest.mark.parametrize("name", ["save", "restore", "close"])
def test_a_call_from_another_thread_during_a_save_is_refused_and_changes_nothing(tmp_path, name):
    training, errors = Training(), []
    calls = {"save": lambda: ckpt.save(7), "restore": lambda: ckpt.restore(), "close": lambda: ckpt.close()}  # noqa: PLW0108

    def call() -> None:
        try:
            calls[name]()
        except RuntimeError as error:
            errors.append(str(error))

    def evaluate(model: nn.Module) -> float:
        other = threading.Thread(target=call)
        other.start()
        other.join()
        return training.evaluate(model)

    with training.checkpointer(tmp_path, evaluate=evaluate) as ckpt:
        record = ckpt.save(1).result()
    assert record.configuration is not None
    assert len(errors) == training.evaluations
    assert set(errors) == {
        f"{name} was called while save of the same Checkpointer was running, from another thread: "
        "use a Checkpointer from one thread"
    }
    assert Run(tmp_path).steps() == [1]
