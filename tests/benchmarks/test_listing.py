"""The benchmark of listings: its runs are sound, and the catalogue that it measures is made while it runs."""

from listing import make, measure

from dynaquant.store.catalogue import LEAST, NAME
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage


def test_every_call_works_on_a_run_that_verifies(tmp_path):
    make(tmp_path, LEAST + 2, 3)
    assert len(measure(tmp_path)) == 8
    assert (tmp_path / NAME).exists()
    run = Run(tmp_path)
    assert len(run.steps()) == LEAST + 2
    assert all(damage(run, step) is None for step in run.steps()[-2:])
