"""The options: which there are, what each value refuses, and their deprecated names.

An option is added on purpose: it goes into the lists here, too.
"""

import inspect
import math
import warnings
from dataclasses import FrozenInstanceError, fields
from typing import get_args

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.cli.convert import Quality
from dynaquant.interop.dcp import StorageWriter
from dynaquant.options import Deprecated, QualityName, options_of


def arguments_of(function) -> list[str]:
    """The names of the arguments but ``self``, with stars where they are."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [stars.get(each.kind, "") + each.name for each in found if each.name != "self"]


# Which options there are


OF_CHECKPOINTER = (
    "folder model optimizer extras evaluate evaluate_average higher_is_better quality roles every keep log_to"
)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (dq.Checkpointer, f"{OF_CHECKPOINTER} **deprecated"),
        (dq.Checkpointer.save, "step exact_weights"),
        (dq.Checkpointer.restore, "step only strict"),
        (dq.save, "state path quality metric higher_is_better parent **deprecated"),
        (StorageWriter, "folder quality keep **deprecated"),
    ],
)
def test_functions_have_these_arguments_and_no_others(function, arguments):
    assert arguments_of(function) == arguments.split()


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (
            dq.Quality,
            "preset max_degradation training_budget expected_restores method configuration correct_moments",
        ),
        (dq.Auto, "max_overhead mean_time_between_failures"),
        (dq.Moved, "distance"),
        (dq.Keep, "last every best lossless_copy keyframe_every"),
    ],
)
def test_values_have_these_fields_and_no_others(value, names):
    assert [field.name for field in fields(value)] == names.split()


def test_the_docstring_of_the_checkpointer_fits_a_screen():
    assert len(inspect.getdoc(dq.Checkpointer).splitlines()) <= 60


def test_options_of_transformers():
    pytest.importorskip("transformers")
    from dynaquant.integrations.transformers import Options

    known = "quality evaluate evaluate_average higher_is_better exact roles extras keep log_to strict only"
    assert list(Options.__annotations__) == known.split()


def test_options_of_accelerate():
    pytest.importorskip("accelerate")
    from dynaquant.integrations.accelerate import attach

    assert arguments_of(attach) == ["accelerator", "folder", "**options"]


def test_options_of_lightning():
    pytest.importorskip("lightning")
    from dynaquant.integrations.lightning import CheckpointIO, Training

    known = "quality metric higher_is_better training skip_objects exact **deprecated"
    assert arguments_of(CheckpointIO) == known.split()
    assert arguments_of(Training) == ["batches"]


def test_options_of_torchtitan():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchtitan imports what PyTorch calls deprecated
        from dynaquant.integrations.torchtitan import CheckpointManager

        inherited = {field.name for field in fields(CheckpointManager.Config.__mro__[1])}
    own = [field.name for field in fields(CheckpointManager.Config) if field.name not in inherited]
    assert own == ["quality", "max_degradation", "training_budget", "expected_restores"]


def test_the_command_line_names_all_presets():
    (option,) = Quality.__metadata__
    assert option.help == f"How much may be lost: {', '.join(get_args(QualityName))}."


# What values refuse


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"preset": "best"},
            r"quality must be one of lossless, high, balanced, small or a dq\.Quality\(…\), not 'best'",
        ),
        ({"preset": None}, "quality must be one of"),
        ({"method": "uniform"}, "method must be .grid. or .published., not 'uniform'"),
        ({"preset": "lossless", "max_degradation": 0.0}, "takes no max_degradation"),
        ({"preset": "lossless", "method": "grid"}, "takes no max_degradation, method or"),
        ({"preset": "lossless", "configuration": dq.GridConfiguration(0)}, "method or configuration"),
        ({"configuration": dq.Configuration(), "max_degradation": 0.0}, "exclude each other"),
        (
            {"configuration": dq.GridConfiguration(0), "method": "published"},
            "a GridConfiguration cannot be used with method 'published'; leave out method",
        ),
        ({"configuration": dq.Configuration(), "method": "grid"}, "a Configuration cannot be used with method 'grid'"),
        ({"max_degradation": 5}, r"max_degradation is a fraction .* 5 means 500 %; for 5 % give 0\.05"),
        ({"max_degradation": 1.0}, r"1 means 100 %; for 1 % give 0\.01"),
        ({"max_degradation": "0.01"}, r"e\.g\. 0\.01, not '0\.01', which is text"),
        ({"training_budget": 2.5}, r"training_budget is a fraction .* for 2\.5 % give 0\.025"),
        ({"training_budget": 0.01, "preset": "lossless"}, "training_budget has no effect without a search"),
        ({"training_budget": 0.01, "configuration": dq.GridConfiguration(0)}, "training_budget has no effect"),
        ({"expected_restores": 0}, "expected_restores must be a whole number of at least 1, not 0"),
        ({"expected_restores": 3.0}, r"expected_restores must be a whole number of at least 1, not 3\.0"),
        ({"expected_restores": 3, "max_degradation": 0.01}, "there is none: give training_budget, too"),
        ({"expected_restores": 3, "method": "published"}, "there is none: give training_budget, too"),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(value),
)
def test_a_quality_that_makes_no_sense_is_refused_with_advice(fields, said):
    with pytest.raises(ValueError, match=said):
        dq.Quality(**fields)


@pytest.mark.parametrize("value", [-0.01, math.nan, math.inf, "1%", True])
@pytest.mark.parametrize("name", ["max_degradation", "training_budget"])
def test_shares_that_are_no_numbers_in_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number"):
        dq.Quality(**{name: value})
    with pytest.raises(ValueError, match="training_budget must be a finite number above 0"):
        dq.Quality(training_budget=0)


@pytest.mark.parametrize("value", [0, -0.1, math.nan, math.inf, True, "0.1"])
@pytest.mark.parametrize("name", ["max_overhead", "mean_time_between_failures"])
def test_an_automatic_interval_needs_numbers_above_zero(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be a finite number above 0, e\.g\. \d"):
        dq.Auto(**{name: value})


def test_an_overhead_of_all_the_time_is_refused():
    with pytest.raises(ValueError, match=r"max_overhead must be below 1, not 2; for 2 percent, give 0\.02"):
        dq.Auto(max_overhead=2)


@pytest.mark.parametrize("distance", [0, -0.1, math.nan, math.inf, True, "0.02", None])
def test_a_distance_must_be_a_number_above_zero(distance):
    with pytest.raises(ValueError, match=r"Moved needs a finite distance above 0, e\.g\. Moved\(0\.02\) for 2 %"):
        dq.Moved(distance)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
@pytest.mark.parametrize("name", ["last", "every", "best", "keyframe_every"])
def test_what_to_keep_is_counted_in_whole_numbers(name, value):
    with pytest.raises(ValueError, match=rf"Keep\({name}=…\) must be a whole number of at least 1, not"):
        dq.Keep(**{name: value})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: dq.Keep(lossless_copy="latest"), "lossless_copy must be True or False, not 'latest'"),
        (lambda: dq.Quality(correct_moments=None), "correct_moments must be True or False, not None"),
        (lambda: dq.Quality(configuration="small"), "configuration must be a Configuration or a GridConfiguration"),
        (lambda: dq.Keep(3), "positional argument"),
        (lambda: dq.Quality("high", 0.01), "positional argument"),
    ],
)
def test_fields_of_a_wrong_type_are_refused(value, said):
    with pytest.raises(TypeError, match=said):
        value()


@pytest.mark.parametrize("every", [0, -1, "often", "", 0.0, -3.0, 2.5, math.nan, True, dq.Moved, dq.Keep()])
def test_every_is_a_number_of_steps_or_a_value(every):
    with pytest.raises(
        ValueError, match=r"every must be at least 1 \(a number of steps\), a dq\.Auto\(…\) or a dq\.Mov"
    ):
        options_of("f", {}, every=every)


def test_values_do_not_change():
    with pytest.raises(FrozenInstanceError):
        dq.Keep().last = 3
    assert dq.Quality("high", max_degradation=0.02) == dq.Quality("high", max_degradation=0.02)


# Deprecated names


def training_of() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            {"max_degradation": 0.02},
            {"quality": dq.Quality(max_degradation=0.02)},
            r"max_degradation=0\.02 is deprecated: give quality=dq\.Quality\(max_degradation=0\.02\)$",
        ),
        (
            {"quality": "high", "training_budget": 0.01, "expected_restores": 3},
            {"quality": dq.Quality("high", training_budget=0.01, expected_restores=3)},
            r"expected_restores=3 are deprecated: give quality=dq\.Quality\('high', training_budget=0\.01, expected",
        ),
        (
            {"method": "published", "correct_moments": False},
            {"quality": dq.Quality(method="published", correct_moments=False)},
            r"give quality=dq\.Quality\(method='published', correct_moments=False\)$",
        ),
        (
            {"configuration": dq.GridConfiguration(3)},
            {"quality": dq.Quality(configuration=dq.GridConfiguration(3))},
            r"give quality=dq\.Quality\(configuration=GridConfiguration\(scale=3",
        ),
        ({"every": "auto"}, {"every": dq.Auto()}, r"^every='auto' is deprecated: give every=dq\.Auto\(\)$"),
        (
            {"every": "auto", "max_overhead": 0.1, "mean_time_between_failures": 60.0},
            {"every": dq.Auto(max_overhead=0.1, mean_time_between_failures=60.0)},
            r"give every=dq\.Auto\(max_overhead=0\.1, mean_time_between_failures=60\.0\)$",
        ),
        (
            {"keep_last": 3, "keep_every": 10, "keep_best": 2, "exact": "latest", "keyframe_every": 4},
            {"keep": dq.Keep(last=3, every=10, best=2, lossless_copy=True, keyframe_every=4)},
            r"give keep=dq\.Keep\(last=3, every=10, best=2, lossless_copy=True, keyframe_every=4\)$",
        ),
        ({"keep_last": None, "exact": None}, {}, "keep_last=None, exact=None are deprecated: leave it out$"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_deprecated_names_mean_what_they_meant_and_name_what_replaces_them(old, new, said):
    given = {name: value for name, value in old.items() if name in ("quality", "every", "keep")}
    deprecated = {name: value for name, value in old.items() if name not in given}
    with pytest.warns(DeprecationWarning, match=said) as warned:
        found = options_of("f", deprecated, **given)
    assert found == options_of("f", {}, **new)
    assert len(warned) == 1


def test_every_deprecated_name_has_a_value():
    names = {"max_degradation", "training_budget", "expected_restores", "method", "configuration", "correct_moments"}
    names |= {"max_overhead", "mean_time_between_failures"}
    names |= {"keep_last", "keep_every", "keep_best", "exact", "keyframe_every"}
    assert set(Deprecated.__annotations__) == names
    for name in names:
        with pytest.warns(DeprecationWarning, match=f"{name}=None is deprecated"):
            assert options_of("f", {name: None}) == options_of("f", {})


def test_a_training_with_the_old_names_runs_and_the_warning_is_at_its_line(tmp_path):
    options = {"max_degradation": 0.02, "keep_last": 1, "exact": "latest", "every": "auto"}
    with pytest.warns(DeprecationWarning, match=r"give quality=dq\.Quality\(.*, every=dq\.Auto\(\), keep=") as warned:
        ckpt = dq.Checkpointer(tmp_path, *training_of(), evaluate=lambda _: 1.0, **options)
    assert [warning.filename for warning in warned] == [__file__]
    with ckpt:
        assert ckpt.max_degradation == 0.02
        assert not ckpt.due(1)
        for step in (1, 2):
            assert ckpt.save(step).result().limit == 0.02
        assert ckpt.steps() == [2]
    assert len(list(tmp_path.glob("exact-*"))) == 1


def test_entry_points_take_the_old_names_that_they_had(tmp_path):
    with pytest.warns(DeprecationWarning, match="max_degradation=0.02 is deprecated") as warned:
        record = dq.save({"w": torch.ones(8, 8)}, tmp_path / "s.dqc", metric=lambda _: 1.0, max_degradation=0.02)
    assert (record.limit, warned[0].filename) == (0.02, __file__)
    with pytest.warns(DeprecationWarning, match=r"give keep=dq\.Keep\(last=2, keyframe_every=3\)") as warned:
        StorageWriter(tmp_path / "run", keep_last=2, keyframe_every=3)
    assert warned[0].filename == __file__
    with pytest.raises(TypeError, match=r"save\(\) got an unexpected keyword argument 'keep_last'"):
        dq.save({}, tmp_path / "s.dqc", keep_last=3)


def test_integrations_take_the_old_names_that_they_had():
    pytest.importorskip("transformers")
    from dynaquant.integrations.transformers.options import checked

    with pytest.warns(DeprecationWarning, match=r"give quality=.*, keep=dq\.Keep\(every=10, lossless_copy=True\)"):
        found = checked({"max_degradation": 0.02, "keep_every": 10, "exact": "latest"})
    assert found == {"quality": dq.Quality(max_degradation=0.02), "keep": dq.Keep(every=10, lossless_copy=True)}
    assert checked({"exact": None, "strict": False}) == {
        "exact": None,
        "strict": False,
        "quality": dq.Quality(),
        "keep": dq.Keep(),
    }
    pytest.importorskip("lightning")
    from dynaquant.integrations.lightning import CheckpointIO

    with pytest.warns(DeprecationWarning, match="max_degradation=0.02 is deprecated") as warned:
        CheckpointIO(max_degradation=0.02)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"quality": dq.Quality("high"), "max_degradation": 0.02},
            r"max_degradation cannot be given beside quality=dq\.Quality\(…\): write one value, e\.g\. "
            r"quality=dq\.Quality\('high', max_degradation=0\.02\)",
        ),
        ({"keep": dq.Keep(last=3), "keep_last": 3}, r"last cannot be given beside keep=dq\.Keep\(…\)"),
        (
            {"every": 10, "max_overhead": 0.1},
            r"beside every=10: write one value, e\.g\. every=dq\.Auto\(max_overhead=0\.1\)",
        ),
        ({"max_overhead": 0.1}, "max_overhead cannot be given beside every=None"),
        ({"every": dq.Moved(0.1), "max_overhead": 0.1}, r"beside every=dq\.Moved\(…\)"),
        ({"exact": "yes"}, 'exact must be "latest" or None, .* use quality="lossless"'),
        ({"max_degradation": 5}, "for 5 % give 0.05"),
    ],
)
def test_the_same_thing_given_twice_or_wrong_is_an_error(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        dq.Checkpointer(tmp_path / "run", *training_of(), **options)
    assert not (tmp_path / "run").exists()


def test_an_unknown_name_is_the_usual_error(tmp_path):
    with pytest.raises(TypeError, match=r"Checkpointer\(\) got an unexpected keyword argument 'keep_newest'"):
        dq.Checkpointer(tmp_path, *training_of(), keep_newest=3)
