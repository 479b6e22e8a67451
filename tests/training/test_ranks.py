"""Several processes: ranks reach the same decision, share the work, keep their own generators, and never hang."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from launched import launch
from movement import Movement
from replicas import STEPS, metric_of, model_of, optimizer_of, weights_of

import dynaquant as dq
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights
from dynaquant.methods.published.size import SizeModel
from dynaquant.state.roles import labels

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.slow
TIMEOUT = 150
"""Seconds. Much more than a launch needs, so a timeout means that a rank hangs."""
FIRST_EVALUATIONS = 5
"""Evaluations of the weights in training at a first save."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Path]:
    """The folders of all launches, shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "replicas"
    shared.mkdir(exist_ok=True)
    folders = {scenario: shared / scenario for scenario in ("two", "four", "metrics")}
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for (scenario, folder), ranks in zip(folders.items(), (2, 4, 2), strict=True):
            if not folder.exists():
                folder.mkdir()
                if scenario == "four":
                    shutil.copytree(folders["two"] / "run", folder / "run")
                (folder / "end.json").write_text(
                    json.dumps(launch(SUPPORT / "replicas.py", ranks, TIMEOUT, scenario, folder))
                )
    return folders


def reports_of(folder: Path, ranks: int) -> list[dict]:
    """Return the report of each rank."""
    reports = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    assert all(report.exists() for report in reports), json.loads((folder / "end.json").read_text())[1]
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module")
def folder(launched) -> Path:
    return launched["two"]


@pytest.fixture
def two(folder) -> list[dict]:
    return reports_of(folder, 2)


@pytest.fixture
def four(launched) -> list[dict]:
    return reports_of(launched["four"], 4)


@pytest.fixture
def metrics(launched) -> list[dict]:
    return reports_of(launched["metrics"], 2)


@pytest.fixture(params=[2, 4])
def saves(request) -> list[list[dict]]:
    """The outcomes of each save, by rank."""
    reports = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    saves = [report["saves"] + ([report["after"]] if "after" in report else []) for report in reports]
    return list(zip(*saves, strict=True))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory) -> list[dict]:
    """The records of a single process that repeats the training of the two ranks with their gradients."""
    model = model_of()
    optimizer = optimizer_of(model)
    metric = metric_of(model)
    gradients = torch.load(folder / "gradients.pt")
    records = []
    run = tmp_path_factory.mktemp("alone")
    with dq.Checkpointer(run, model, optimizer, evaluate=metric, quality=dq.Quality(method="published")) as ckpt:
        for save in range(4):
            for step in gradients[save * STEPS : (save + 1) * STEPS]:
                for parameter, gradient in zip(model.parameters(), step, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            metric.remember()
            records.append(ckpt.save(save + 1).result().to_json() | {"weights": weights_of(model)})
    return records


def tensors(plain: dict[str, list]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in plain.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# One decision


@pytest.mark.slow
def test_all_ranks_reach_the_same_decision(saves):
    for outcomes in saves:
        for name in (
            "configuration",
            "search",
            "judged_by",
            "limit",
            "quality",
            "progress",
            "predicted",
            "trials",
            "interval",
        ):
            assert all(outcome["record"][name] == outcomes[0]["record"][name] for outcome in outcomes), name
        assert all(outcome["weights"] == outcomes[0]["weights"] for outcome in outcomes)
        record = outcomes[0]["record"]
        assert record["quality"]["degradation"] <= record["limit"]
    searches = [outcomes[0]["record"]["search"] for outcomes in saves]
    assert searches[0] == "exhaustive"
    assert "neighbourhood" in searches


def test_ranks_that_write_no_file_report_no_ratio(two):
    for first, other in zip(*(report["saves"] for report in two), strict=True):
        assert first["file"]["ratio"] > 1
        assert first["file"]["keyframe"] == (first["record"]["parent"] is None)
        assert (other["file"]["ratio"], other["file"]["keyframe"]) == (None, None)
    assert min(two[1]["saves"][-1]["file"]["ratios"]) > 1  # every rank can read the run


def test_after_a_restore_all_ranks_keep_the_same_displacement(two):
    for outcomes in zip(*(report["later"] for report in two), strict=True):
        assert outcomes[0]["weights"] == outcomes[1]["weights"]
        record, other = (outcome["record"] for outcome in outcomes)
        for name in ("configuration", "search", "quality", "progress", "trials", "notes"):
            assert record[name] == other[name], name
        assert record["quality"]["degradation"] <= record["limit"]
    records = [outcome["record"] for outcome in two[0]["later"]]
    assert records[0]["progress"] is not None
    assert any(trial["degradation"] is None for record in records for trial in record["trials"])


def test_with_the_grid_method_all_ranks_reach_the_same_decision(two, folder):
    for outcomes in zip(*(report["grid"] for report in two), strict=True):
        assert outcomes[0]["weights"] == outcomes[1]["weights"]
        record, other = (outcome["record"] for outcome in outcomes)
        for name in ("configuration", "search", "limit", "quality", "progress", "trials", "notes"):
            assert record[name] == other[name], name
        assert record["search"] == "scale"
        assert record["quality"]["degradation"] <= record["limit"]
        assert [record["identity"] == "" for record in (record, other)] == [False, True]
    records = [outcome["record"] for outcome in two[0]["grid"]]
    assert [record["progress"] is None for record in records[:4]] == [True, True, True, False]
    assert not any(record["moments_corrected"] for record in records)  # saves a step apart keep first moments
    tried = [report["grid"][0]["calls"] - FIRST_EVALUATIONS for report in two]
    assert sum(tried) >= len(records[0]["trials"])
    step, weights = two[0]["grid"][2]["restored"]
    assert [report["grid"][2]["restored"] for report in two] == [[step, weights]] * 2
    assert step == 3
    assert same(tensors(weights), dq.load(folder / "grid", 3)["model"])


def test_several_ranks_decide_like_a_single_process(two, alone):
    for outcome, record in zip(two[0]["saves"], alone, strict=True):
        assert same(tensors(outcome["weights"]), record["weights"])
        assert outcome["record"]["quality"]["original"] == record["quality"]["original"]
        assert outcome["record"]["configuration"] == record["configuration"]
        assert outcome["record"]["search"] == record["search"]
        assert outcome["record"]["quality"] == record["quality"]


def test_degradations_equal_those_of_a_single_process_whichever_rank_measures_them(two, alone):
    common = 0
    for outcome, record in zip(two[0]["saves"], alone, strict=True):
        trials_alone = {json.dumps(trial["configuration"]): trial for trial in record["trials"]}
        for trial in outcome["record"]["trials"]:
            if other := trials_alone.get(json.dumps(trial["configuration"])):
                common += 1
                assert trial["degradation"] == other["degradation"]
    assert common > 5


def test_all_ranks_predict_sizes_with_the_same_factor(saves):
    """Rank 0 writes the files and learns how much smaller deltas are than keyframes."""
    for outcomes in saves:
        weights = {f"model.{name}": w for name, w in tensors(outcomes[0]["weights"]).items() if w.ndim == 2}
        sizes = SizeModel(kmeans_weights(weights, labels(weights, {"model": model_of()}, {}), {}))
        trials = outcomes[0]["record"]["trials"]
        factors = [t["predicted"] / sizes.predict(dq.Configuration(**t["configuration"])) for t in trials]
        assert factors == pytest.approx([factors[0]] * len(factors), rel=0.005)  # predictions are rounded to bytes


def test_only_rank_0_writes(saves):
    for outcomes in saves:
        assert outcomes[0]["record"]["identity"]
        assert outcomes[0]["record"]["total"]["stored"] > 0
        assert {outcome["record"]["identity"] for outcome in outcomes[1:]} == {""}


# Sharing the work


def test_each_rank_scores_different_candidates(saves):
    for save, outcomes in enumerate(saves):
        of_the_original = 1 if save else FIRST_EVALUATIONS
        rounds = {outcome["calls"] - of_the_original for outcome in outcomes}
        assert len(rounds) == 1  # every rank takes part in every round
        trials = len(outcomes[0]["record"]["trials"])
        assert trials <= max(rounds) * len(outcomes)
        if save == 0:
            assert trials > 2 * len(outcomes)
            assert max(rounds) < 1.8 * trials / len(outcomes)


def test_an_exhaustive_search_takes_fewer_rounds_than_in_a_single_process(two, alone):
    rounds = two[0]["saves"][0]["calls"] - FIRST_EVALUATIONS
    assert rounds < 0.8 * len(alone[0]["trials"])


# Metrics that communicate


def test_every_kind_of_communication_is_detected(metrics):
    ways = metrics[0]["seen"]
    assert {name for name, seen in ways.items() if not seen} == {"nothing", "a group of one rank"}
    assert len(ways) > 12
    assert metrics[1]["seen"] == ways


@pytest.mark.parametrize("metric", ["mean", "late", "to_rank_0"])
def test_a_metric_that_communicates_scores_the_stored_weights(metrics, launched, metric):
    for step, (save, other) in enumerate(zip(*(report["saves"][metric] for report in metrics), strict=True), start=1):
        record = save["record"]
        for name in ("configuration", "quality", "trials", "notes"):
            assert record[name] == other["record"][name], name
        model = model_of()
        model.load_state_dict(tensors(save["weights"]))
        alone = Movement(model, 3.0)
        model.load_state_dict(dq.load(launched["metrics"] / metric, step)["model"])
        assert record["quality"]["original"] == pytest.approx(1.0)
        with torch.no_grad():
            assert record["quality"]["restored"] == pytest.approx(alone(model), rel=1e-9)
        assert record["quality"]["degradation"] <= record["limit"]
        assert [note for note in record["notes"] if "evaluate communicates between ranks" in note]


def test_if_the_metric_communicates_all_ranks_score_the_same_candidate(metrics):
    for report in metrics:
        first, second = report["saves"]["mean"]
        assert first["calls"] == FIRST_EVALUATIONS + len(first["record"]["trials"])
        assert second["calls"] == 1 + len(second["record"]["trials"])
        (dealt,) = report["saves"]["float"]
        assert dealt["calls"] < FIRST_EVALUATIONS + len(dealt["record"]["trials"])
        assert dealt["record"]["notes"] == []


# Failures


def test_candidates_on_batches_are_evaluated_by_several_ranks_together(metrics):
    """All ranks decide alike, on as many batches as the rank that needs most, and on all for the chosen candidate."""
    for outcomes in zip(*(report["batches"]["same"] for report in metrics), strict=True):
        record, other = (outcome["record"] for outcome in outcomes)
        assert outcomes[0]["weights"] == outcomes[1]["weights"]
        assert outcomes[0]["calls"] == outcomes[1]["calls"]
        for name in ("configuration", "search", "quality", "trials", "equivalents"):
            assert record[name] == other[name], name
        assert record["quality"]["degradation"] <= record["limit"]
        chosen = next(trial for trial in record["trials"] if trial["configuration"] == record["configuration"])
        assert chosen["share"] == 1
        evaluated = outcomes[0]["calls"] / 20
        assert evaluated <= record["equivalents"] + 1  # candidates are shared; the chosen one is finished by both
    shares = [trial["share"] for outcome in metrics[0]["batches"]["same"] for trial in outcome["record"]["trials"]]
    assert min(shares) < 1


def test_if_a_loss_on_batches_fails_on_one_rank_all_ranks_raise_an_error(metrics):
    for report in metrics:
        (failure,) = report["batches"]["failing"]
        assert failure["error"] == "EvaluateError"
        assert "rank 1: ZeroDivisionError: made to fail on rank 1" in failure["says"]
        assert failure["same files"]


def test_ranks_that_communicate_in_a_loss_on_batches_evaluate_the_same_batches_together(metrics):
    (record, other) = (report["batches"]["late"][0]["record"] for report in metrics)
    assert record["configuration"] == other["configuration"]
    assert record["trials"] == other["trials"]
    assert min(trial["share"] for trial in record["trials"]) < 1
    chosen = next(trial for trial in record["trials"] if trial["configuration"] == record["configuration"])
    assert chosen["share"] == 1


def test_ranks_that_differ_in_their_batches_evaluate_all_of_them(metrics):
    (record, other) = (report["batches"]["uneven"][0]["record"] for report in metrics)
    assert record["configuration"] == other["configuration"]
    assert all(trial["share"] == 1 for trial in record["trials"])
    assert record["equivalents"] >= 5 + len(record["trials"])


def test_if_memory_runs_out_on_one_rank_the_save_fails_on_all(metrics):
    (ended, own) = (report["saves"]["no memory"][0] for report in metrics)
    assert (own["error"], own["says"]) == ("MemoryError", "made to fail on rank 1")
    assert ended["error"] == "DynaquantError"
    assert ended["says"].startswith("rank 1 failed: MemoryError: made to fail on rank 1")
    assert all(outcome["same files"] and outcome["same draws"] for outcome in (ended, own))


def test_if_the_metric_fails_on_one_rank_all_ranks_raise_an_error(two):
    for report in two:
        for failure in report["failures"]:
            assert failure["error"] == "EvaluateError"
            assert "rank 1: ZeroDivisionError: made to fail on rank 1" in failure["says"]
            assert "rank 0" not in failure["says"]
            assert failure["same files"]


def test_after_the_failure_training_continues_and_saves(two):
    assert [report["after"]["record"]["step"] for report in two] == [5, 5]
    assert two[0]["after"]["record"]["configuration"] == two[1]["after"]["record"]["configuration"]


def test_processes_that_catch_failures_exit_normally(folder):
    status, output = json.loads((folder / "end.json").read_text())
    assert status == 0, output


def test_an_uncaught_failure_ends_all_processes(launched):
    status, output = json.loads((launched["four"] / "end.json").read_text())
    assert status != 0
    assert "ends with evaluate failed" in output
    assert "rank 2: ZeroDivisionError: made to fail on rank 2" in output
    assert "AssertionError" not in output


# Restore


def test_all_ranks_restore_the_same_weights_and_their_own_generators(two, folder):
    stored = dq.load(folder / "run")["model"]
    for report in two:
        assert report["restored"]["step"] == 5
        assert same(tensors(report["restored"]["weights"]), stored)
        assert report["restored"]["draws"] == report["draws"]
    assert two[0]["draws"]["torch"] != two[1]["draws"]["torch"]
    assert two[0]["draws"]["generator"] != two[1]["draws"]["generator"]


def test_a_checkpoint_of_two_ranks_is_restored_by_four(two, four):
    for report in four:
        assert report["restored"]["step"] == 5
        assert report["restored"]["weights"] == two[0]["restored"]["weights"]
    assert [report["restored"]["draws"] for report in four[:2]] == [report["draws"] for report in two]
    # New ranks keep the states of their generators.
    assert [report["restored"]["draws"] for report in four[2:]] == [report["own"] for report in four[2:]]


def test_a_checkpoint_of_two_ranks_is_restored_by_a_single_process(two, folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    model = model_of()
    generator = torch.Generator().manual_seed(9)
    with dq.Checkpointer(tmp_path / "run", model, optimizer_of(model), extras={"generator": generator}) as ckpt:
        assert ckpt.restore() == 5
    assert same(weights_of(model), tensors(two[0]["restored"]["weights"]))
    assert torch.rand(4).tolist() == two[0]["draws"]["torch"]
    assert torch.rand(4, generator=generator).tolist() == two[0]["draws"]["generator"]


def test_a_single_process_reads_the_records_of_several_ranks(two, folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")  # another test process may hold the lock of the folder
    model = model_of()
    generator = torch.Generator()
    with dq.Checkpointer(tmp_path / "run", model, optimizer_of(model), extras={"generator": generator}) as ckpt:
        records = [record.to_json() for record in ckpt.records()]
    written = [*(save["record"] for save in two[0]["saves"]), two[0]["after"]["record"]]
    for record, before in zip(records, written, strict=True):
        del record["seconds"], before["seconds"]
        assert json.loads(json.dumps(record)) == before
