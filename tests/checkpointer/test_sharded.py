"""Sharded trainings: saved by some ranks, restored by others, and undisturbed by saves."""

import json
import sys
from pathlib import Path

import pytest
import torch
from commands import call
from launched import launch, launch_anew
from sharded_training import model_of
from training import bits

import dynaquant as dq
from dynaquant.engine.forms.form import stored_equal
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.patchwork import Patchwork
from dynaquant.engine.forms.stored import in_one
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.store.run import Run

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
TIMEOUT = 150
"""Seconds. Much more than a launch needs, so a timeout means that a rank hangs."""


def run(script, ranks, *arguments):
    status, output = launch(SUPPORT / script, ranks, TIMEOUT, *arguments)
    assert status == 0, output
    return output


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_ranks_restore_what_other_ranks_have_saved_and_a_model_follows_them(tmp_path, quality):
    """Each restore is compared with what a process without ranks reads, in ``sharded_ranks.py``."""
    folder, model = tmp_path / "run", model_of("plain")
    follower = dq.follow(folder, model, timeout=0)
    for launches, (ranks, layout) in enumerate(((2, "fsdp"), (4, "fsdp-tp"), (1, "plain"), (4, "hsdp"), (2, "tp")), 1):
        run("sharded_ranks.py", ranks, tmp_path, 2, layout, quality)
        assert list(follower) == [2 * launches]
        assert bits(dict(model.state_dict())) == bits(dict(dq.load(folder)["model"]))
    files = Run(folder).files()[0]
    parents = [file.header.parent and file.header.parent.step for file in files]
    assert parents == [None, *range(1, 10)]  # one chain through all layouts
    parts = [len({part.address for part in file.header.parts}) for file in files]
    assert parts == [2, 2, 4, 4, 0, 0, 4, 4, 2, 2]
    for step in (2, 4, 6, 8, 10):
        wanted = torch.load(tmp_path / f"state-{step}.pt")
        found = dq.load(folder, step)["model"]
        if quality == "lossless":
            assert all(torch.equal(found[name], wanted[f"model.{name}"]) for name in found if f"model.{name}" in wanted)
    call("verify", folder)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Runs of the same weights and moments, by layout."""
    base = tmp_path_factory.mktemp("levels")
    for ranks, layout in ((1, "plain"), (2, "fsdp"), (4, "fsdp-tp"), (4, "hsdp")):
        run("sharded_levels.py", ranks, base / layout, layout)
    return base


@pytest.mark.parametrize("way", ["searched", "high", "stochastic"])
@pytest.mark.parametrize("layout", ["fsdp", "fsdp-tp", "hsdp"])
def test_any_number_of_ranks_stores_the_same_levels(layouts, layout, way):
    found, wanted = Run(layouts / layout / way), Run(layouts / "plain" / way)
    kinds: set[type] = set()
    for step in (5, 10):
        tensors, others = found.load(found.file(step)), wanted.load(wanted.file(step))
        for name, other in others.items():
            if name.startswith(("model", "optimizer")):
                whole = in_one(tensors[name])
                assert type(whole) is type(other), name
                assert stored_equal(whole, other), name
                kinds.add(type(other))
        assert any(isinstance(tensor, Patchwork) for tensor in tensors.values())
    assert kinds >= {QuantizedTensor, ScaledMoment, torch.Tensor}


@pytest.fixture(scope="module", params=[("hsdp", 4), ("fsdp", 2)], ids=["hsdp", "fsdp"])
def scored(request, tmp_path_factory):
    """A layout, and for each metric what its saves have tried, how often each rank evaluated."""
    layout, ranks = request.param
    folder = tmp_path_factory.mktemp("scored")
    run("sharded_scoring.py", ranks, folder, layout)
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(other == found[0] for other in found)
    return layout, found[0]


@pytest.mark.parametrize("metric", ["own", "on_batches"])
def test_replicas_score_different_candidates_at_the_same_time(scored, metric):
    layout, saves = scored[0], scored[1][metric]
    assert max(save["trials"] for save in saves) >= 2
    for save in saves:
        assert not any("communicates" in note for note in save["notes"])
        if layout == "hsdp" and save["trials"] > 2:
            assert save["evaluated"] < save["equivalents"]
        if layout == "fsdp":  # all ranks are one replica
            assert save["evaluated"] == pytest.approx(save["equivalents"])


@pytest.mark.parametrize("metric", ["averaged", "with_gradients"])
def test_replicas_score_candidates_together_if_the_metric_communicates_between_them(scored, metric):
    layout, saves = scored[0], scored[1][metric]
    for save in saves:
        assert any("communicates" in note for note in save["notes"]) == (layout == "hsdp")
        assert save["evaluated"] == save["equivalents"]
        assert save["degradation"] <= 0.002


def test_saves_do_not_change_a_sharded_training(tmp_path):
    run("sharded_undisturbed.py", 2, tmp_path)
    for rank in range(2):
        for way, found in json.loads((tmp_path / f"rank-{rank}.json").read_text()).items():
            # Too early in the training, the metric prefers a model without any weights, and an estimate decides.
            assert set(found.pop("judged_by")) <= {"evaluate", "fisher distortion"}, way
            assert found == {"losses": True, "different": []}, way


@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")
def test_a_rank_needs_at_most_its_share_again_and_one_tensor(tmp_path, monkeypatch):
    """A copy of the whole model would take two thirds of a share more, and one of the whole state three shares."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # returns freed memory to the system at once
    status, output = launch_anew(SUPPORT / "sharded_memory.py", 3, TIMEOUT, tmp_path)
    assert status == 0, output
    tensor = 4 * 2_000_000
    share = 3 * 12 * tensor // 3
    for rank in range(3):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["saves"] <= share + tensor
        assert found["restore"] <= share // 2 + tensor
