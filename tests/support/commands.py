"""Calls the command line in tests, and makes a run for it."""

import json
import sys

import pytest
import torch
from click.testing import Result
from torch import nn
from training import model_of, train
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app, main

STEPS = [20, 40, 60, 80]


def make_run(folder) -> nn.Module:
    """Save four checkpoints, with keyframes at 20 and 80, of a model that has a tied and a constant tensor."""
    torch.manual_seed(0)
    model = model_of(32)
    model[4].weight = model[0].weight
    model.register_buffer("kept[bold]", torch.ones(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dq.Checkpointer(
        folder,
        model,
        optimizer,
        quality=dq.Quality(configuration=dq.Configuration(bins=16, embedding_bins=16)),
        keep=dq.Keep(keyframe_every=3),
    ) as ckpt:
        for step in STEPS:
            train(model, optimizer, 20)
            ckpt.save(step)
    return model


def call(*arguments, code: int = 0) -> str:
    return ran(arguments, code).stdout


def ran(arguments, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def data(*arguments, code: int = 0):
    return json.loads(call(*arguments, "--json", code=code))


def failed(monkeypatch, capsys, reason: str, *arguments) -> None:
    """Assert that a command ends with exit code 1, one message on stderr and nothing on stdout."""
    monkeypatch.setattr(sys, "argv", ["dynaquant", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dynaquant: ")
    assert reason in printed.err
