"""Tensors are read through a chain: on one thread or several, as values or as stored, with the same result."""

import pytest
import torch
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.engine.forms.rounded import RoundedWeight
from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.grid import quantize
from dynaquant.errors import CheckpointError
from dynaquant.store import reading
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run
from dynaquant.store.writing import Checkpoint

STEPS = (1, 2, 3, 4)


@pytest.fixture(scope="module", params=["balanced", "lossless"])
def run(request, tmp_path_factory) -> Run:
    """A chain of four checkpoints. Its moments depend on one another, some weights never change."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model = nn.ModuleDict({"trained": model_of(8), "frozen": nn.Linear(30, 30)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["trained"].parameters(), 1e-2)
    with dq.Checkpointer(folder, model, optimizer, quality=request.param) as checkpointer:
        for step in STEPS:
            train(model["trained"], optimizer)
            checkpointer.save(step).result()
    return Run(folder)


def chain_to(run: Run, step: int):
    return run.chain(run.file(step))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("step", STEPS)
def test_several_threads_read_what_one_does(run, step, threads, monkeypatch):
    monkeypatch.setattr(reading, "_WORTH_A_THREAD", 1)
    wanted = {name: bits(values_of(stored)) for name, stored in reading.load_all(chain_to(run, step)).items()}
    stored = reading.load_all(chain_to(run, step), threads=threads)
    values = reading.load_values(chain_to(run, step), None, threads)
    assert list(stored) == list(values) == list(wanted)
    assert {name: bits(values_of(each)) for name, each in stored.items()} == wanted
    assert {name: bits(each) for name, each in values.items()} == wanted


def test_only_what_is_asked_for_is_returned(run):
    moment = next(name for name in run.file(4).header.by_name if name.endswith(".exp_avg"))
    names = [moment, "model.frozen.weight"]
    assert list(reading.load_values(chain_to(run, 4), names, 2)) == names


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("load", [reading.load_all, reading.load_values])
def test_the_error_names_the_damaged_ancestor(run, load, threads, monkeypatch):
    monkeypatch.setattr(reading, "_WORTH_A_THREAD", 1)
    chain = chain_to(run, 4)
    name = "model.trained.0.weight"
    damaged = chain[2].header.by_name[name]
    assert chain[1].header.by_name[name].needs_parent
    monkeypatch.setitem(chain[2].header.by_name, name, damaged.__class__(**{**vars(damaged), "hash": "0" * 64}))
    monkeypatch.setitem(
        chain[0].header.by_name,
        name,
        chain[0].header.by_name[name].__class__(**{**vars(chain[0].header.by_name[name]), "hash": "1" * 64}),
    )
    with pytest.raises(CheckpointError, match=r"step-000000000002\.dqc: tensor model\.trained\.0\.weight does not"):
        load(chain, None, threads)


def test_a_reference_is_decoded_from_what_it_refers_to_although_the_other_tensor_has_new_levels(tmp_path):
    # The master weight gets another grid, on which it rounds to the same half-precision weight.
    masters = quantize(torch.tensor([0.0, 1.0, 0.0]), 0), quantize(torch.tensor([0.0, 1.0009, 0.0]), -19)
    halves = [RoundedWeight(torch.bfloat16, master, "master") for master in masters]
    assert bits(halves[0].values()) == bits(halves[1].values())
    assert bits(masters[0].values()) != bits(masters[1].values())
    labels = dict.fromkeys(("master", "half"), Label("weight"))
    run, base = WritableRun(tmp_path), None
    for step, master, half in zip((1, 2), masters, halves, strict=True):
        _, base = run.commit(Checkpoint(step, None, {"master": master, "half": half}, labels), base)
    file = run.file(2)
    assert file.header.by_name["half"].scheme.is_reference
    found = reading.load_all(run.chain(file))
    assert bits(values_of(found["half"])) == bits(halves[1].values())
    assert bits(values_of(found["master"])) == bits(masters[1].values())
