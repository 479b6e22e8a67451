"""Trainings on two ranks that were once saved, restored or continued wrongly: see ``support/sharded_findings.py``."""

from pathlib import Path

import pytest
from launched import findings_of
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_findings.py"


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Return by scenario what each rank has found."""
    folder = tmp_path_factory.mktemp("findings")
    return findings_of(SCRIPT, folder)


def test_a_stored_tensor_with_the_shape_of_a_shard_of_a_larger_model_is_refused(findings):
    for found in findings["larger model"]:
        assert found["strict"].startswith("StateError: ")
        assert "model.0.weight was float32[4, 8] and is float32[8, 8]" in found["strict"]
        assert found["unchanged"]


def test_a_stored_tensor_with_the_shape_of_a_shard_of_a_larger_model_can_be_left_out(findings):
    for found in findings["larger model"]:
        assert found["step"] == 1
        assert "model.0.weight was float32[4, 8] and is float32[8, 8]" in found["not restored"]
        assert any("model.0.weight.exp_avg is [4, 8]" in problem for problem in found["not restored"])
        assert found["weights unchanged"]
        assert found["same"]  # what the next save has stored


@pytest.mark.parametrize(
    ("how", "lengths"),
    [("longer", [1000]), ("much longer", [1_000_000]), ("more", [3]), ("fewer", [3, 1_500_000])],
)
def test_extras_that_differ_between_replicas_leave_a_readable_checkpoint(findings, how, lengths):
    wanted = {"same": True, "parts": 0, "extras": lengths}  # those of rank 0
    assert findings[f"extras of replicas: {how}"] == [wanted] * 2


@pytest.mark.parametrize(("how", "lengths"), [("longer", [100, 100]), ("fewer", [3, 4]), ("bounded", [3, 4])])
def test_extras_that_differ_between_ranks_of_a_sharded_model_leave_a_readable_checkpoint(findings, how, lengths):
    wanted = {"same": True, "parts": 2, "extras": lengths}
    assert findings[f"extras of shards: {how}"] == [wanted] * 2


def test_rank_0_writes_all_if_replicas_have_other_optimizer_states(findings):
    first, second = findings["other optimizer states"]
    assert first == {"same": True, "parts": 0, "extras": []}
    assert second == {"same": False, "parts": 0, "extras": []}


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this PyTorch cannot forget a forward pass")
@pytest.mark.parametrize("way", ["defaults", "not resharded", "prefetched"])
def test_a_training_goes_on_unchanged_after_evaluate_has_raised_in_a_forward_pass(findings, way):
    for rank, found in enumerate(findings[f"raising: {way}"]):
        assert found["failed"].startswith("EvaluateError: evaluate failed, so nothing was saved; ")
        assert f"rank {rank}: ArithmeticError: bad batch" in found["failed"]
        assert found["losses"]
        assert found["state"]
        assert found["last"] == 3


@pytest.mark.parametrize("kind", ["dict", "class"])
def test_sharded_tensors_in_extras_are_restored(findings, kind):
    for found in findings[f"sharded extras: {kind}"]:
        assert found == {"differs": True, "step": 1, "restored": True, "same": True, "parts": 2, "extras": []}


@pytest.mark.parametrize("role", ["weight", "bound"])
def test_a_frozen_sharded_parameter_is_evaluated_with_the_values_that_are_stored(findings, role):
    wanted = {"stored is quantized": True, "evaluated as stored": True, "unchanged": True}
    assert findings[f"frozen: {role}"] == [wanted] * 2


def test_a_checkpointer_that_was_made_before_the_model_was_sharded_refuses_to_save(findings):
    for found in findings["early"]:
        assert found["refused"].startswith(
            "StateError: the model was sharded after this Checkpointer was made; shard it"
        )


def test_frozen_parameters_of_replicas_stay_in_a_file_of_their_own(findings):
    assert findings["frozen replicas"][0] == {"frozen": 1, "parts": 0}


def test_a_training_goes_on_if_hooks_divide_a_parameter_in_the_state_dict(findings):
    assert findings["hooks"] == [{"restored": True, "continued": True}] * 2


def test_a_run_with_omitted_tensors_is_not_called_damaged_by_a_sharded_model(findings):
    for found in findings["omitted"]:
        assert found["strict"].startswith("StateError: ")
        assert "model.blocks.0.up.weight is not stored (role 'omit')" in found["strict"]
        assert "values of a sharded tensor cannot be compared" in found["strict"]


@pytest.mark.parametrize("what", ["mean squares", "weights", "moments"])
def test_an_error_on_one_rank_is_raised_on_all_and_the_training_goes_on(findings, what):
    texts = ["DynaquantError: rank 1 failed: MemoryError: no memory", "MemoryError: no memory"]
    wanted = [{"failed": text, "losses": True, "state": True, "last": 3} for text in texts]
    assert findings[f"failing: {what}"] == wanted
