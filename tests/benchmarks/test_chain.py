"""The benchmark of chains measures a chain: its last link depends on its keyframe."""

import chain

from dynaquant.store.run import Run


def test_saves_and_loads_are_measured(tmp_path):
    saved = chain.save_chain(tmp_path, 3, 20, 4, "balanced")
    loaded = chain.load_ends(tmp_path, 4)
    assert all(value > 0 for value in (*saved.values(), *loaded.values()))
    run = Run(tmp_path / "run")
    assert run.steps() == [1, 2, 3, 4]
    assert [file.header.step for file in run.chain(run.file(4))] == [4, 3, 2, 1]
