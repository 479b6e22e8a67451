"""Ranks that do not see, hold or do the same: see ``support/ranks_apart.py``."""

import json
from pathlib import Path

import pytest
import torch
from launched import findings_of, launch
from ranks_apart import Apart

import dynaquant as dq
from dynaquant.interop.export import export
from dynaquant.interop.targets import Target
from dynaquant.restore.stored_checkpoint import StoredCheckpoint

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_apart.py"
TIMEOUT = 300
"""Seconds. Much more than the launch needs."""
RANKS = range(2)


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Return by scenario what each rank has found."""
    folder = tmp_path_factory.mktemp("apart")
    return {"folder": folder, **findings_of(SCRIPT, folder)}


# Ranks do not see the same folder


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_a_folder_that_is_not_shared_is_an_error_of_the_constructor(findings, layout):
    for found in findings[f"own folders: {layout}"]:
        assert found.startswith("CheckpointError: ")
        assert "rank-1" in found.split(" is not the folder that rank 0 writes to")[0]
        assert "rank 1 does not see what rank 0 has written there" in found
        assert "Give all ranks one folder on a file system that they share" in found


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_ranks_that_open_different_checkpoints_of_one_step_restore_nothing(findings, layout):
    for found in findings[f"other checkpoints: {layout}"]:
        assert "rank 1 has opened another checkpoint than rank 0" in found["restored"]
        assert found["unchanged"]


def test_ranks_that_disagree_are_told_so(findings):
    for found in findings["disagreeing"]:
        assert found == [
            "ValueError: roles must agree on all ranks",
            "ValueError: ranks save different steps: 5, 6",
            True,
        ]


def test_ranks_must_give_the_same_objects(findings):
    for rank, (missing, other, only_here) in enumerate(findings["other objects"]):
        assert missing.startswith("StateError: rank 1 has no 'log', which rank 0 has")
        assert other.startswith("StateError: optimizer updates model.bias on rank 1, but not on rank 0")
        assert only_here == [1, {"log": {"seen": [1, 2]}} if rank == 1 else {}]


def test_ranks_that_restore_different_parts_end_their_restores_together(findings):
    assert findings["restored in part"] == [[1, True], [1, False]]


def test_ranks_of_different_meshes_must_hold_the_same(findings):
    for found in findings["islands: apart"]:
        assert found.startswith("StateError: model.weight has other values on rank 1 than on rank 0")
        assert "which holds the same part of it on another device mesh" in found
    assert findings["islands: the same"] == [1, 1]


def test_a_checkpoint_is_due_on_all_ranks_at_the_same_step_although_their_weights_differ(findings):
    first, second = findings["moved"]
    assert first == second
    assert len(first) > 1


@pytest.mark.parametrize("how", ["", ", on batches"])
def test_a_metric_that_only_rank_0_computes_still_decides(findings, how):
    for found in findings[f"metric of one rank{how}"]:
        assert found["recorded"] == pytest.approx(found["true"], abs=1e-5)
        assert found["recorded"] <= found["limit"]
        assert any(note.startswith("evaluate returns other numbers on other ranks") for note in found["notes"])


def test_gradients_that_fsdp2_has_not_added_up_are_noted_and_not_stored(findings):
    for notes, error in findings["gradients"]:
        assert any("in the middle of an accumulation" in note for note in notes)
        assert error.startswith("StateError: gradients: FSDP2 holds gradients that it has not added up over the ranks")


def test_a_dtensor_that_has_no_place_yet_is_refused(findings):
    for before, after, same in findings["another shape"]:
        assert "optimizer.state.model.weight.rows was a DTensor, and nothing says how to divide it now" in before
        assert after == 1
        assert same


# Ranks hold different values

WAYS = ["small", "lossless", "copy", "published", "sharded", "sharded, quantized"]


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_gets_back_what_it_held(findings, way):
    for found in findings[f"apart: {way}"]:
        assert found["wrong"] == []
        assert found["step"] == (1 if way in ("copy", "published") else 2)
        assert found["sharded"] == ("shar" in way)


@pytest.mark.parametrize("way", WAYS)
def test_what_all_ranks_hold_alike_is_stored_once(findings, way):
    names = findings[f"apart: {way}"][0]["differs"]
    assert {"ranks.1.model.expert.weight", "ranks.1.loader.order", "ranks.1.memory.seen"} <= set(names)
    assert not any(".shared." in name for name in names)


@pytest.mark.parametrize("way", WAYS)
def test_the_record_tells_of_weights_that_differ(findings, way):
    assert all(found["noted"] for found in findings[f"apart: {way}"])


def test_a_difference_is_found_when_it_begins_and_is_gone_when_it_ends(findings):
    def is_stored(name, save):
        return f"ranks.1.model.{name}" in findings["later"][0][save]

    assert [is_stored("expert.weight", save) for save in range(5)] == [False, False, True, True, False]
    assert not any(is_stored("shared.weight", save) for save in range(5))


def test_buffers_that_ddp_sets_to_those_of_rank_0_are_stored_once(findings):
    assert findings["broadcast buffers"] == [[], []]


def test_an_average_is_exact_if_its_metric_fails_on_one_rank(findings):
    for found in findings["average"]:
        assert found["averages"] == []
        assert any("'ema' is stored exactly" in note and "no metric here" in note for note in found["notes"])


@pytest.fixture
def saved_by_two(findings):
    return findings["folder"] / "apart-lossless"


def test_another_number_of_ranks_cannot_take_what_differs(saved_by_two):
    training = Apart(quality="lossless")
    before = training.state()
    with training.open(saved_by_two) as ckpt, pytest.raises(dq.StateError) as raised:
        ckpt.restore()
    text = str(raised.value)
    for what in ("model.expert.bias (like 3 others of model)", "optimizer.state.model.expert", "memory.seen", "loader"):
        assert what in text
    assert "differs between the 2 ranks that saved it, and cannot go to one process" in text
    assert "What differs between ranks can be restored on 2 ranks" in text
    assert "running_mean" not in text
    assert "shared" not in text
    after = training.state()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_has_nothing_to_do_with_the_number_of_ranks_gets_no_advice_on_it(saved_by_two):
    training = Apart(quality="lossless")
    training.extras = {"another": [1], **training.extras}
    with training.open(saved_by_two) as ckpt, pytest.raises(dq.StateError) as raised:
        ckpt.restore(only="another")
    assert "the checkpoint has no extra 'another'" in str(raised.value)
    assert "differs between ranks" not in str(raised.value)


def test_another_number_of_ranks_can_leave_out_what_differs(saved_by_two):
    training = Apart(quality="lossless")
    before = training.state()
    with training.open(saved_by_two) as ckpt:
        assert ckpt.restore(strict=False) is not None
        assert len(ckpt.not_restored) == 4
    after, stored = training.state(), dq.load(saved_by_two)["model"]
    for name in ("shared.weight", "shared.bias", "norm.running_mean"):
        assert torch.equal(after[name], stored[name])
        assert not torch.equal(after[name], before[name])
    for name in ("expert.weight", "norm.weight", "loader.next", "memory.seen"):
        assert torch.equal(after[name], before[name])


def test_an_extra_that_divides_its_state_gets_the_states_of_all_ranks(saved_by_two):
    training = Apart(quality="lossless")
    with training.open(saved_by_two) as ckpt:
        ckpt.restore(only="divided")
    divided = training.extras["divided"]
    assert divided.next == 2 + 7 + 2 * 5  # where the ranks began, and their steps
    assert divided.order.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_a_loaded_state_tells_what_differs(saved_by_two):
    state = dq.load(saved_by_two)
    first, second = state["ranks"]
    assert first == {}
    assert not torch.equal(second["tensors"]["model.expert.weight"], state["model"]["expert.weight"])
    assert second["objects"]["loader"]["next"] == state["loader"]["next"] + 5


def test_an_export_names_no_ranks_among_the_objects_that_it_leaves_out(saved_by_two, tmp_path, caplog):
    notes = export(StoredCheckpoint(saved_by_two), Target.TORCH, tmp_path / "model.pt")
    assert notes == ["left out: optimizer, loader, divided, memory, random number generators"]
    assert "only those of rank 0 are read here" in caplog.text


# Ranks wait for one that does something else


@pytest.mark.parametrize(
    ("case", "rank", "what", "advice"),
    [
        (
            "forward",
            1,
            "rank 0",
            "do the same there on all ranks",
        ),  # in either of two errors
        ("long", 1, "rank 1 waited in save for rank 0, still in evaluate", "init_process_group(timeout=…)"),
        ("constructor", 0, "rank 0 waited for rank 1 to make its Checkpointer", "Make it on all ranks"),
        ("save", 0, "rank 0 waited in save for rank 1, not in save", "Call save on all ranks, at the same steps"),
    ],
)
def test_a_rank_that_waits_in_vain_says_for_whom_and_what_to_do(tmp_path, case, rank, what, advice):
    status, output = launch(SCRIPT, len(RANKS), TIMEOUT, tmp_path, "waiting", case)
    assert status == 0, output
    found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
    assert what in found
    assert advice in found
    other = json.loads((tmp_path / f"rank-{1 - rank}.json").read_text())
    if case == "forward":
        assert "Timed out" in other
        assert advice in other
