"""Wrong arguments are refused with a message that says what to do."""

import os

import numpy as np
import pytest
import torch
from small_runs import LOSSLESS, training_of
from training import model_of, train

import dynaquant as dq


def test_a_state_that_cannot_be_stored_is_named(tmp_path):
    class Loader:
        def state_dict(self):
            return {"position": 3, "source": object()}

        def load_state_dict(self, state):
            self.state = state

    with pytest.raises(dq.StateError, match=r"loader\.source: a value of type builtins\.object cannot be stored"):
        dq.Checkpointer(tmp_path, *training_of(), extras={"loader": Loader()})
    with pytest.raises(dq.StateError, match="loader: range has no state_dict"):
        dq.Checkpointer(tmp_path, *training_of(), extras={"loader": range(2)})
    with dq.Checkpointer(tmp_path, *training_of()):
        pass


@pytest.mark.parametrize("name", ["model", "optimizer", "rng", "classes"])
def test_reserved_names_of_extras_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"extras cannot be called {name}"):
        dq.Checkpointer(tmp_path, *training_of(), extras={name: model_of()})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluate": 0.3}, "evaluate must be a function of the model, not 0.3"),
        ({"extras": [1]}, "extras must be a dictionary of objects by name, not a list"),
        ({"extras": {1: None}}, "extras must be a dictionary of objects by name; 1 is no name, but '1' is"),
        ({"keep": 3}, r"keep must be a dq\.Keep\(…\), e\.g\. dq\.Keep\(last=3\), not 3"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(tmp_path, options, said):
    with pytest.raises(TypeError, match=said):
        dq.Checkpointer(tmp_path, *training_of(), **options)


@pytest.mark.parametrize("quality", ["excellent", None, 0.01])
def test_a_refused_checkpointer_does_not_hold_the_run(tmp_path, quality):
    said = r"quality must be one of lossless, high, balanced, small or a dq\.Quality\(…\), not"
    with pytest.raises(ValueError, match=said):
        dq.Checkpointer(tmp_path, *training_of(), quality=quality)
    assert not any(tmp_path.iterdir())
    with dq.Checkpointer(tmp_path, *training_of()):
        pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-0.01, "max_degradation must be a finite number of at least 0"),
        (5, r"max_degradation is a fraction of the metric, and 5 means 500 %; for 5 % give 0\.05"),
        ("0.01", r"a finite number of at least 0, e\.g\. 0\.01, not '0\.01', which is text"),
    ],
)
def test_max_degradation_is_not_set_to_what_is_no_fraction(tmp_path, value, said):
    with dq.Checkpointer(tmp_path, *training_of(), quality=dq.Quality(max_degradation=0)) as ckpt:
        assert ckpt.max_degradation == 0
        with pytest.raises(ValueError, match=said):
            ckpt.max_degradation = value
        assert ckpt.max_degradation == 0


def test_a_lossless_save_searches_for_nothing(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, **LOSSLESS) as ckpt:
        for step in (1, 2):
            train(model, optimizer, 3)
            record = ckpt.save(step).result()
            assert (record.search, record.configuration, record.limit) == ("lossless", None, None)


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (1.0, ValueError), ("1", ValueError), (None, ValueError)]
)
def test_a_step_must_be_an_integer_of_at_least_zero(tmp_path, step, error):
    with dq.Checkpointer(tmp_path, *training_of()) as ckpt:
        with pytest.raises(error):
            ckpt.save(step)
        assert ckpt.save(0).result().step == 0


def test_a_second_writer_of_a_run_is_refused(tmp_path):
    said = "another Checkpointer, here or in another process, is writing to this run"
    with dq.Checkpointer(tmp_path, *training_of()), pytest.raises(dq.CheckpointError, match=said):
        dq.Checkpointer(tmp_path, *training_of())
    with dq.Checkpointer(tmp_path, *training_of()):
        pass


@pytest.mark.parametrize("step", [2**63, 2**64, 10**400], ids=["2**63", "2**64", "10**400"])
def test_a_step_too_large_for_the_file_format_is_refused_at_once(tmp_path, step):
    model, optimizer = training_of()
    called = []
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=lambda _: called.append(1) or 1.0) as ckpt:
        with pytest.raises(ValueError, match=r"step must be less than 2\*\*63"):
            ckpt.save(step)
        assert (called, os.listdir(tmp_path)) == ([], [])
        assert ckpt.save(2**63 - 1).result().step == 2**63 - 1
        assert ckpt.restore() == 2**63 - 1


def test_a_closed_checkpointer_refuses_calls(tmp_path):
    ckpt = dq.Checkpointer(tmp_path, model_of())
    ckpt.close()
    for call in (ckpt.restore, lambda: ckpt.save(1)):
        with pytest.raises(ValueError, match="has been closed"):
            call()


def test_a_pattern_that_matches_nothing_is_an_error_before_training(tmp_path):
    with pytest.raises(dq.StateError, match="matches no tensor"):
        dq.Checkpointer(tmp_path, *training_of(), roles={"nope*": "exact"})


@pytest.mark.parametrize("integer", [np.int64, np.uint32, torch.tensor], ids=["int64", "uint32", "tensor"])
@pytest.mark.parametrize("every", [2, dq.Auto()], ids=["2", "auto"])
def test_steps_are_integers_of_any_kind(tmp_path, integer, every):
    model = torch.nn.Linear(2, 2)
    automatic = every == dq.Auto()
    every = every if automatic else integer(every)
    with dq.Checkpointer(tmp_path, model, quality="lossless", every=every) as ckpt:
        due = [step for step in range(1, 3) if ckpt.due(integer(step))]
        assert due == ([] if automatic else [2])
        for step in (2, 4):
            ckpt.save(integer(step)).result()
        ckpt.tag("first", integer(2))
        assert ckpt.steps() == [2, 4]
        assert ckpt.restore(integer(2)) == ckpt.restore("first") == 2
    assert torch.equal(dq.load(tmp_path, integer(4))["model"]["weight"], model.weight)
    assert dq.load_into(model, tmp_path, integer(4)) == []
    with (
        dq.Checkpointer(tmp_path, model, quality="lossless") as ckpt,
        pytest.raises(dq.CheckpointError, match="an integer"),
    ):
        ckpt.restore(True)


def test_the_home_folder_is_found_and_an_empty_path_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with dq.Checkpointer("~/runs/a", model, quality="lossless") as ckpt:
        ckpt.save(1)
    assert (tmp_path / "home" / "runs" / "a" / "step-000000000001.dqc").is_file()
    dq.save({"x": torch.ones(3)}, "~/x.dqc")
    assert dq.load("~/x.dqc")["x"].tolist() == [1, 1, 1]
    assert dq.load_into(model, "~/runs/a") == []
    assert dq.follow("~/runs/a", model).update() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    for use in (
        lambda: dq.Checkpointer("", model),
        lambda: dq.save({}, ""),
        lambda: dq.load(""),
        lambda: dq.load_into(model, ""),
        lambda: dq.follow("", model),
    ):
        with pytest.raises(ValueError, match="the path is empty"):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_state_dict_in_place_of_the_model_is_refused(tmp_path):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(dq.StateError, match="model is a dictionary of tensors, as a state_dict; give the model itself"):
        dq.Checkpointer(tmp_path, model.state_dict())
