"""``log_to``: records of saves for TensorBoard or a function."""

import importlib.util
import logging

import pytest
import torch
from training import model_of, train

import dynaquant as dq


class Curves:
    """Has the interface of a SummaryWriter."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}

    def add_scalar(self, tag, scalar_value, global_step) -> None:
        assert isinstance(scalar_value, float)
        self.points.setdefault(tag, {})[global_step] = scalar_value


def saved(folder, log_to, **options):
    """Save twice and return the records."""
    model = model_of(8)
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(folder, model, optimizer, log_to=log_to, **options) as ckpt:
        records = []
        for step in (10, 20):
            train(model, optimizer)
            records.append(ckpt.save(step).result())
    return records


def test_add_scalar_gets_the_numbers_of_the_records(tmp_path):
    curves = Curves()
    records = saved(tmp_path, curves, evaluate=lambda model: float(model[1].weight.square().sum()))
    assert all(tag.startswith("dynaquant/") for tag in curves.points)
    for record in records:
        at = {tag.removeprefix("dynaquant/"): points.get(record.step) for tag, points in curves.points.items()}
        assert at["bytes"] == record.total.stored
        assert at["ratio"] == record.ratio
        assert at["weight/ratio"] == record.roles["weight"].ratio
        assert at["quality/degradation"] == record.quality.degradation
        assert at["seconds/write"] == record.seconds["write"]
        assert at["scale"] == record.configuration.scale


def test_missing_numbers_are_not_logged(tmp_path):
    curves = Curves()
    saved(tmp_path, curves, quality="lossless")
    assert not any("quality" in tag or tag.endswith(("scale", "progress", "allowed")) for tag in curves.points)


def test_a_function_gets_each_record_after_the_commit(tmp_path):
    told = []

    def log_to(record) -> None:
        assert dq.load(tmp_path, record.step)
        told.append(record)

    assert saved(tmp_path, log_to) == told


@pytest.mark.parametrize("broken", ["function", "writer"])
def test_a_failing_log_to_logs_a_warning_and_the_checkpoint_is_saved(tmp_path, caplog, broken):
    def fail(*_arguments, **_others):
        raise RuntimeError("out of paper")

    log_to = fail if broken == "function" else type("Writer", (), {"add_scalar": fail})()
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, log_to)
    assert caplog.text.count("out of paper") == 2
    assert dq.load(tmp_path, 20)


def test_an_invalid_log_to_is_refused_before_the_folder_is_created(tmp_path):
    with pytest.raises(TypeError, match="log_to must be a function"):
        dq.Checkpointer(tmp_path / "run", model_of(8), log_to="tensorboard")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_files_contain_the_numbers_of_the_records(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "log") as writer:
        records = saved(tmp_path / "run", writer)
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    points = {event.step: event.value for event in events.Scalars("dynaquant/bytes")}
    assert points == {record.step: record.total.stored for record in records}
