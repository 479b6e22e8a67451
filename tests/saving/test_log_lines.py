"""What a save writes to the log: one line once it is committed, and some while a search takes long."""

import itertools
import logging
import os
import pty
import re
import select
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from launched import launch
from small_runs import loss_of, training_of
from training import train

import dynaquant as dq
from dynaquant.search import search_log
from dynaquant.store.run import Run

SUPPORT = Path(__file__).parents[1] / "support"


def lines(caplog, begins: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(begins)]


def test_each_save_logs_one_line_from_the_writing_thread_once_it_is_committed(tmp_path, caplog):
    model, optimizer = training_of()
    there = []

    class Seen(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("saved step"):
                there.append((Run(tmp_path).steps()[-1], threading.current_thread().name, record.levelname))

    logger, handler = logging.getLogger("dynaquant"), Seen()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "dynaquant"), dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
            for step in (10, 20):
                train(model, optimizer)
                ckpt.save(step)
            records = ckpt.records()
    finally:
        logger.removeHandler(handler)
    assert there == [(10, "dynaquant", "INFO"), (20, "dynaquant", "INFO")]
    first, second = lines(caplog, "saved step")
    size = records[0].total.stored / 1000
    assert first.startswith(f"saved step 10: {size:.2f} kB ({records[0].ratio:.1f}× smaller), keyframe, quality not")
    assert "delta of step 10" in second
    assert re.search(r"; training waited [\d.]+ s, writing took [\d.]+ s$", second)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"quality": "lossless"}, "weights exact"), ({"evaluate": loss_of}, "degradation [+-]0")],
    ids=["lossless", "metric"],
)
def test_the_line_tells_what_was_lost(tmp_path, caplog, options, said):
    model, optimizer = training_of()
    with caplog.at_level(logging.INFO, "dynaquant"), dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        record = ckpt.save(1).result()
    (line,) = lines(caplog, "saved step 1:")
    assert re.search(said, line)
    if record.quality is not None:
        assert f"{record.quality.degradation:+.2%}" in line


def test_a_write_that_fails_logs_no_line(tmp_path, caplog):
    model, optimizer = training_of()
    with caplog.at_level(logging.INFO, "dynaquant"):
        ckpt = dq.Checkpointer(tmp_path / "run", model, optimizer)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with pytest.raises(dq.CheckpointError):
            ckpt.save(1).result()
        ckpt.close()
    assert lines(caplog, "saved") == []


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_of_several_ranks_one_logs_the_line(tmp_path, layout):
    status, output = launch(SUPPORT / "logging_ranks.py", 2, 150, tmp_path, layout)
    assert status == 0, output
    assert re.findall(r"^(\w+): saved step (\d):", output, re.MULTILINE) == [("dynaquant", "1"), ("dynaquant", "2")]
    assert bool(Run(tmp_path / "run").newest().header.parts) == (layout == "fsdp")  # both ranks have written then


def test_a_long_search_says_that_it_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(search_log, "FIRST", 0.0)
    model, optimizer = training_of()
    calls = []

    def evaluate(model) -> float:
        calls.append(model)
        return loss_of(model)

    with (
        caplog.at_level(logging.INFO, "dynaquant"),
        dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as c,
    ):
        record = c.save(1).result()
    said = lines(caplog, "still searching")
    assert said[0] == "still searching after 0 s: 1 candidate scored"
    assert 1 <= len(said) <= len(record.trials)


@pytest.mark.parametrize("batched", [False, True], ids=["function", "batches"])
def test_the_first_save_says_after_one_evaluation_how_long_it_will_take(tmp_path, caplog, monkeypatch, batched):
    monkeypatch.setattr(search_log, "LONG", 0.0)
    model, optimizer = training_of()
    said_before = []

    def evaluate(model, _batch=None) -> float:
        said_before.append(len(lines(caplog, "the first save evaluates")))
        return loss_of(model)

    metric = dq.LossOn(range(5), evaluate) if batched else evaluate
    with (
        caplog.at_level(logging.INFO, "dynaquant"),
        dq.Checkpointer(tmp_path, model, optimizer, evaluate=metric) as ckpt,
    ):
        for step in (1, 2):
            ckpt.save(step).result()
    (said,) = lines(caplog, "the first save")
    assert re.fullmatch(r"the first save evaluates the model up to 6 times, about \d+ s; later .* three times", said)
    first = 5 if batched else 1
    assert said_before[: first + 1] == [*first * [0], 1]


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_a_terminal_gets_a_bar_that_is_gone_when_the_search_ends(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(search_log, "LONG", 0.0)
    model, optimizer = training_of()
    terminal, inside = pty.openpty()
    count = itertools.count()

    def evaluate(model) -> float:
        if fails and next(count) == 2:
            raise KeyboardInterrupt
        return loss_of(model)

    with os.fdopen(inside, "w") as stderr, dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            ckpt.save(1).result()
        shown = ""
        while not shown.endswith("\r\x1b[K") and select.select([terminal], [], [], 5)[0]:  # it comes in pieces
            shown += os.read(terminal, 100_000).decode()
    os.close(terminal)
    drawn = re.findall(r"dynaquant .*?(\d+)/\d+ evaluations", shown)
    assert drawn[0] == "1"
    assert fails or drawn[1] == "2"
    assert shown.endswith("\r\x1b[K")


def test_a_short_search_is_silent(tmp_path, caplog):
    model, optimizer = training_of()
    torch.manual_seed(0)
    with caplog.at_level(logging.DEBUG, "dynaquant"), dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        ckpt.save(1).result()
    assert lines(caplog, "still") == lines(caplog, "the first save") == []
