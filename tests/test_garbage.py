"""The garbage collector pauses during a save, but not while a metric runs, and searches little while it is written."""

import gc
import os
import threading
import weakref

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.garbage import collection_paused, collection_resumed, older_objects_skipped


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


class Cycle:
    """An object that only the collector frees."""

    def __init__(self):
        self.itself = self


def test_only_objects_that_are_made_meanwhile_are_searched():
    older, finds = Cycle(), []
    freed_older, freed_younger = weakref.ref(older), None

    def work():
        nonlocal older, freed_younger
        with older_objects_skipped():
            younger = Cycle()
            freed_younger = weakref.ref(younger)
            del older, younger
            gc.collect()
            finds.extend([freed_older() is None, freed_younger() is None])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert finds == [False, True]
    gc.collect()
    assert freed_older() is None
    assert not gc.get_freeze_count()


def test_what_the_user_has_frozen_stays_frozen():
    gc.freeze()
    try:
        with older_objects_skipped():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_searches_all_its_objects():
    with older_objects_skipped():
        if not (child := os.fork()):
            os._exit(bool(gc.get_freeze_count()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_freeze_count()


class Extra:
    """Notes, when its state is taken, whether the collector runs: here, and in a process that is forked."""

    def __init__(self):
        self.ran, self.ran_in_child = [], []

    def state_dict(self):
        self.ran.append(gc.isenabled())
        if child := os.fork():
            self.ran_in_child.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
        else:
            os._exit(0 if gc.isenabled() else 1)
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_collector_pauses_during_a_save_but_not_in_a_metric_or_a_forked_process(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    in_metric, extra = [], Extra()

    def evaluate(model):
        in_metric.append(gc.isenabled())
        return float(model.weight.square().sum())

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, extras={"extra": extra}) as checkpointer:
        extra.ran.clear()
        checkpointer.save(1)
    assert extra.ran == [False]
    assert extra.ran_in_child[-1:] == [True]
    assert in_metric
    assert all(in_metric)
    assert gc.isenabled()
