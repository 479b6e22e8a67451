"""The benchmark of chains measures a chain: its last link depends on its keyframe."""

import chain

from dynaquant.store.run import Run


def test_saves_and_loads_are_measured(tmp_path):
    saved = chain.save_chain(tmp_path, chain.Size(3, 20, 4, steps=3), "balanced")
    loads = [chain.load_once(tmp_path, what) for what in (chain.TORCH, "3", "12")]
    assert all(value > 0 for name, value in saved.items() if name != "memory")
    assert all(load["seconds"] > 0 for load in loads)
    run = Run(tmp_path / "run")
    assert run.steps() == [3, 6, 9, 12]
    assert [file.header.step for file in run.chain(run.file(12))] == [12, 9, 6, 3]
