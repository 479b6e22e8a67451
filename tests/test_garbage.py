"""The garbage collector pauses during a save, but not while a metric runs."""

import gc
import threading

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.garbage import collection_paused, collection_resumed


def test_the_collector_runs_again_after_a_pause_and_after_an_error():
    with collection_paused():
        assert not gc.isenabled()
        with collection_resumed():
            assert gc.isenabled()
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused(), collection_resumed():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_user_has_disabled_stays_disabled():
    try:
        with collection_paused(), collection_resumed():
            gc.disable()
        assert not gc.isenabled()
        with collection_paused(), collection_resumed():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_other_threads_pause_nothing():
    found = []

    def look():
        with collection_paused():
            found.append(gc.isenabled())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True]


def test_the_collector_runs_while_a_metric_does(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    ran = []

    def evaluate(model):
        ran.append(gc.isenabled())
        return float(model.weight.square().sum())

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as checkpointer:
        checkpointer.save(1)
    assert ran
    assert all(ran)
    assert gc.isenabled()
