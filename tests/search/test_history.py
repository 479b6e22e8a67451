"""Records and histories of searches: read back as written, and refused or ignored if they are invalid."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from movement import Movement
from rewritten import with_record
from searches import BOTH_METHODS, checkpointer, loss, run, training_of
from tiers import examples
from torch import nn
from training import train

import dynaquant as dq
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.engine.quantize.step_limits import BALANCED_LIMITS
from dynaquant.methods.grid.method import history_after
from dynaquant.methods.method import WeightsToPrepare
from dynaquant.methods.named import METHODS
from dynaquant.ranks.group import Group
from dynaquant.search.decision import Decision
from dynaquant.search.live_model import LiveModel
from dynaquant.search.manager import ConfigurationManager, Limits
from dynaquant.search.metric import UserMetric
from dynaquant.search.search_memory import History, SearchMemory
from dynaquant.state.roles import labels
from dynaquant.store.run import Run

# Records


@pytest.mark.parametrize("evaluate", [loss, None, 100.0, 1e9], ids=["loss", "no metric", "more bins", "lossless"])
@BOTH_METHODS
def test_records_read_back_equal_those_of_save_except_for_the_time_of_writing(tmp_path, evaluate, method):
    records = run(tmp_path, evaluate, 2, quality=dq.Quality(method=method))
    with checkpointer(tmp_path, *training_of()) as ckpt:
        read = ckpt.records()
    for record, back in zip(records, read, strict=True):
        assert set(record.seconds) - set(back.seconds) == {"write"}
        assert replace(record, seconds=back.seconds) == back
        assert json.loads(json.dumps(back.to_json(), allow_nan=False))["search"] == record.search
        assert all(trial.seconds > 0 for trial in back.trials)
        if back.predicted is not None:
            assert 0.2 < back.predicted / back.roles["weight"].stored < 5


@pytest.fixture(scope="module")
def run_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run(folder, loss, 1)
    return folder


def resumed(folder, run_of_one, **changes) -> tuple[dq.Checkpointer, nn.Module, torch.optim.Optimizer]:
    """Restores a training from a checkpoint with a changed record."""
    shutil.copytree(run_of_one, folder, dirs_exist_ok=True)
    with_record(Run(folder).path(1), **changes)
    model, optimizer = training_of(1)
    ckpt = checkpointer(folder, model, optimizer, evaluate=loss, every=dq.Auto())
    assert ckpt.restore() == 1
    return ckpt, model, optimizer


@pytest.mark.parametrize("search", [None, {"history": [7]}, {"history": {"-7": {"bins": "16"}}}], ids=str)
def test_an_invalid_search_in_a_restored_record_starts_a_new_one(tmp_path, run_of_one, search):
    ckpt, model, optimizer = resumed(tmp_path, run_of_one, search=search)
    with ckpt:
        train(model, optimizer, 5)
        record = ckpt.save(2).result()
    assert record.search in ("exhaustive", "more bins")
    assert len(record.trials) > 4


@pytest.mark.parametrize("interval", ["often", -5, 0, 2.5, []])
def test_an_invalid_interval_in_a_restored_record_is_ignored(tmp_path, run_of_one, interval):
    with resumed(tmp_path, run_of_one, interval=interval)[0] as ckpt:
        assert not ckpt.due(2)
        assert ckpt.due(1 + 50)


@pytest.mark.parametrize(
    "changes",
    [
        {"quality": {"restored": 10**400}},
        {"search": {"trials": [7]}},
        {
            "search": {
                "trials": [
                    {
                        "configuration": {},
                        "predicted": 10**400,
                        "degradation": 0,
                        "progress": 1,
                        "seconds": 0,
                        "error": None,
                    }
                ]
            }
        },
        {"configuration": {"bins": 0}},
        {"configuration": {"scale": "fine"}},
    ],
    ids=["quality", "trials", "predicted", "bins", "scale"],
)
def test_reading_an_invalid_record_raises_an_error(tmp_path, run_of_one, changes):
    with (
        resumed(tmp_path, run_of_one, **changes)[0] as ckpt,
        pytest.raises(dq.CheckpointError, match="its record of the save cannot be understood"),
    ):
        ckpt.records()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
VALUES = st.sampled_from([4, 5.5, 300, 0, -1, 0.3, math.nan, True, None, "magnitude", "sensitivity", "both", [], {}])
KNOBS = st.dictionaries(
    st.sampled_from(["bins", "embedding_bins", "pruned", "pruning_metric", "protected", "protection_metric", "x"]),
    VALUES | JSON,
    max_size=4,
) | st.dictionaries(st.sampled_from(["scale", "dithered", "x"]), VALUES | JSON, max_size=2)
SCALES = st.fixed_dictionaries({"exponent": VALUES, "levels": st.lists(st.floats() | VALUES, max_size=5) | JSON})
HISTORIES = st.dictionaries(st.integers(-40, 5).map(str) | st.text(max_size=3), KNOBS | JSON, max_size=3) | (
    st.fixed_dictionaries({"scale": SCALES})
)
RECORDS = st.fixed_dictionaries({}, optional={"search": st.fixed_dictionaries({"history": HISTORIES | JSON}) | JSON})


def decide(record, method: str) -> Decision:
    """Returns the decision that goes on from a record, for a model with 30 weights."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    weights = {"model.weight": model.weight.detach()}
    found = WeightsToPrepare(weights, labels(weights, {"model": model}, {}), BALANCED_LIMITS)
    prepared, _ = METHODS[method].prepare(found, Group())
    manager = ConfigurationManager(UserMetric(LiveModel(model), Movement(model, 1.0), False, Group()), None, Group())
    return manager.decide(prepared, {}, SearchMemory.from_record(record, {}), Limits(0.01, 0.01))


@BOTH_METHODS
@given(record=RECORDS)
@examples(20)
def test_the_next_decision_stays_within_the_limit_whatever_a_record_contains(method, record):
    decision = decide(record, method)
    assert decision.limit <= 0.01
    assert decision.search == "lossless" or decision.quality.degradation <= decision.limit
    assert json.loads(json.dumps(decision.memory.to_json(), allow_nan=False))


@BOTH_METHODS
def test_a_decision_goes_on_from_a_record_as_from_the_memory_itself(method):
    memory = decide({}, method).memory
    stored = json.loads(json.dumps({"search": memory.to_json()}))
    again = SearchMemory.from_record(stored, {})
    assert replace(again, noise=memory.noise, whole=memory.whole) == memory
    assert decide(stored, method).memory.saves == memory.saves + 1


def test_a_score_far_from_the_result_tells_later_searches_nothing():
    """After a search that found nothing, the finest grid is scored. Its degradation is all noise."""
    found = GridConfiguration(-40)
    usual = history_after(History(), 0.01, found, {-40: 0.007})
    for noise in (1e-7, -1e-7):
        assert history_after(History(), 0.01, found, {-363: noise, -40: 0.007}) == usual
    assert history_after(History(), 0.01, GridConfiguration(-363), {-363: 1e-7}).scale.at_scale_1


@pytest.mark.parametrize(
    "history",
    [
        None,
        {"-7": None},
        {"-7": {"bins": 10**400}},
        {"-7": {"bins": 16, "colour": 1}},
        {"-7": {"pruned": -1}},
        {"-7": {"pruned": math.nan}},
        {"-7": {"pruning_metric": ["magnitude"]}},
        {"often": {"bins": 16}},
        {"": {}},
        {"1e3": {}},
        {"-7": {"bins": 16}, "-8": {"bins": 0}},
    ],
    ids=str,
)
def test_an_invalid_history_starts_a_new_search(history):
    assert decide({"search": {"history": history}}, "published").search == "exhaustive"


@pytest.mark.parametrize(
    "history",
    [
        {"scale": None},
        {"scale": 16},
        {"scale": [16, []]},
        {"scale": {"exponent": 16}},
        {"scale": {"exponent": "fine", "levels": []}},
        {"scale": {"exponent": 0.5, "levels": []}},
        {"scale": {"exponent": math.nan, "levels": []}},
        {"scale": {"exponent": 16, "levels": None}},
        {"scale": {"exponent": 16, "levels": [0.1, "much"]}},
        {"scale": {"exponent": 16, "levels": [math.nan]}},
        {"scale": {"exponent": 16, "levels": [10**400]}},
        {"scale": {"exponent": 16, "levels": []}, "often": {"bins": 16}},
        {"-7": {"scale": 16}},  # of an earlier version
    ],
    ids=lambda history: str(history)[:40],
)
def test_an_invalid_history_of_scale_exponents_starts_a_new_search(history):
    found, afresh = (decide({"search": {"history": past}}, "grid") for past in (history, None))
    assert [trial.configuration for trial in found.trials] == [trial.configuration for trial in afresh.trials]
