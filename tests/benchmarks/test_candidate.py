"""The benchmark of one candidate: every method runs, and its table compares them with a copy."""

import torch
from candidate import VALUES, WANTED, Row, methods, table, verdict
from synthetic import transformer

from dynaquant.engine.quantize.grid_weights import grid_weights


def test_every_method_runs_on_a_small_model():
    model = transformer(100_000, torch.Generator().manual_seed(0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    matrices = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.ndim >= 2}
    found = {name: run() for name, run in methods(model, grid_weights(matrices, {}, {}, seed=0)).items()}
    assert found["a candidate"] == found["a candidate, through levels"]
    assert 0 < found["displacement since a restore"] <= 1
    assert found["distortion, without a metric"].degradation > 0
    assert all(map(torch.equal, before, model.parameters()))


def test_the_slower_kind_of_candidate_decides_and_the_table_compares_with_the_copy():
    rows = [Row("copy", 0.1, 0.2, 0), Row("nearest", 0.2, 0.3, 496_000_000), Row("stochastic", WANTED + 0.01, 0.3, 0)]
    assert verdict(rows, VALUES).startswith("MISSED: a candidate takes 0.260 s")
    assert verdict(rows[:2], VALUES).startswith("passed: a candidate takes 0.200 s")
    assert [cells[3:] for cells in table(rows, VALUES).rows][:2] == [["1.0×", "0"], ["2.0×", "496"]]
