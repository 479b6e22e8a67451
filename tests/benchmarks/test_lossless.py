"""All coders of the lossless page code the same tensors of two checkpoints, and return them."""

import pytest
import torch
from checkpoints import real_chain


@pytest.fixture
def lossless(monkeypatch):
    for package in ("blosc2", "pcodec", "zipnn"):
        pytest.importorskip(package)
    module = pytest.importorskip("lossless")
    monkeypatch.setattr(module, "REPEATS", 1)
    monkeypatch.setenv("MOONCLIP_FSYNC", "1")  # which a coder changes
    return module


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # ZipNN's import
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_every_coder_returns_the_tensors(lossless, dtype, tmp_path):
    files = [tmp_path / f"{step}.pt" for step in range(2)]
    for checkpoint, file in zip(real_chain(), files, strict=False):
        moments = {
            i: {"exp_avg": checkpoint.first[name], "exp_avg_sq": checkpoint.second[name]}
            for i, name in enumerate(checkpoint.weights)
        }
        torch.save({"model": checkpoint.weights, "optimizer": {"state": moments}}, file)
    rows = {row.method: row for row in lossless.measure(*files, dtype)}  # compares every stream
    raw = {method: row.raw for method, row in rows.items()}
    assert all(found == raw["dynaquant, alone"] for found in raw.values())
    assert all(row.encoding > 0 and row.decoding > 0 for row in rows.values())
    sizes = {method: sum(row.coded.values()) for method, row in rows.items()}
    assert sizes["dynaquant, given the parent"] < sizes["zstd -3"]
    if "moonclip, given the parent" in sizes:
        assert 0 < sizes["moonclip, given the parent"] < 2 * sizes["zstd -3"]
