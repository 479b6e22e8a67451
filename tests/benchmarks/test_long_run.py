"""The benchmark of long runs: it keeps every checkpoint, and times what it says."""

import long_run

from dynaquant.store.catalogue import LEAST, NAME
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage


def test_saves_restores_and_listings_are_timed(tmp_path):
    folder, count = tmp_path / "run", LEAST + 3
    times = long_run.save_all(folder, count, 2)
    assert len(times) == count
    assert all(0 < blocked <= whole for blocked, whole in times)
    assert list(long_run.shown_saves(times)) == [10, count]
    run = Run(folder)
    assert run.steps() == list(range(1, count + 1))
    assert damage(run, count) is None
    calls = long_run.other_calls(folder, 2)
    assert len(calls) == 7
    assert (folder / NAME).exists()
