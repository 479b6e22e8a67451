"""The comparison with the last release: what counts as larger or slower, and the figures that are kept."""

import json
import sys

import pytest
import regression
from regression import KEPT, LARGER, PRESETS, TRAININGS, Figures, compare, main, ratios_of, rounded, table, times

BEFORE = Figures({"small": 20.0, "large": 1.3}, {"save": 4.0})


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Replaces the measurement by given figures, and regression.json by figures of a release."""
    monkeypatch.setattr(regression, "KEPT", tmp_path / "regression.json")

    def run(ratios, save, *arguments):
        now = Figures({"small": ratios[0], "large": ratios[1]}, {"save": save})
        monkeypatch.setattr(regression, "on_cores", lambda _cores, _function: now)
        monkeypatch.setattr(sys, "argv", ["regression.py", *arguments])
        main()

    regression.KEPT.write_text(
        json.dumps({"of": "release 1.0", "machine": {"cpu": "one", "cores": 2}, **rounded(BEFORE)})
    )
    return run


def test_a_lower_ratio_and_a_longer_time_are_worse():
    (ratio,) = compare({"a": 20.0}, {"a": 16.0}, higher_is_better=True)
    (time,) = compare({"a": 2.0}, {"a": 3.0}, higher_is_better=False)
    assert (ratio.worse, time.worse) == (1.25, 1.5)
    assert table("", [ratio], LARGER, "LARGER").rows == [["a", "20.00×", "16.00×", "1.250", "LARGER"]]
    assert table("", [time], 2.0, "slower").rows == [["a", "2.00×", "3.00×", "1.500", ""]]


def test_figures_that_are_missing_or_new_have_to_be_kept_first():
    with pytest.raises(ValueError, match=r"other figures .*\(new, old\).* --keep"):
        compare({"a": 1.0, "old": 1.0}, {"a": 1.0, "new": 1.0}, higher_is_better=True)


@pytest.mark.parametrize("ratios", [(20.0, 1.3), (19.5, 1.27), (30.0, 2.0)])
def test_a_checkpoint_of_the_same_size_or_smaller_passes(measured, ratios, capsys):
    measured(ratios, 4.0)
    shown = capsys.readouterr().out
    assert "release 1.0" in shown
    assert "LARGER" not in shown
    assert "slower" not in shown


def test_a_checkpoint_that_is_larger_by_more_than_the_limit_fails_and_is_named(measured, capsys):
    with pytest.raises(SystemExit) as failed:
        measured((20.0, 1.25), 4.0)
    assert failed.value.code == 1
    assert "larger than in the last release by more than 3%: large\n" in capsys.readouterr().out


def test_a_slower_save_is_only_a_warning(measured, capsys):
    measured((20.0, 1.3), 8.1)
    assert "WARNING: slower than in the last release" in capsys.readouterr().out


def test_figures_that_are_kept_are_those_of_the_next_comparison(measured, capsys):
    measured((10.0, 1.2), 9.0, "--keep")
    assert "nothing has been released yet" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    measured((10.0, 1.2), 9.0)
    with pytest.raises(SystemExit):
        measured((9.0, 1.2), 9.0)


@pytest.mark.slow
def test_the_kept_figures_are_those_that_are_measured():
    kept = json.loads(KEPT.read_text())
    ratios = {name: ratio for name in TRAININGS for name, ratio in ratios_of(name, 4, 2).items()}
    assert kept["ratios"].keys() == ratios.keys()
    assert kept["times"].keys() == times(30_000, turns=1).keys()
    assert all(ratio > 1 for ratio in kept["ratios"].values())
    assert all(ratios[f"{name}, lossless, weights"] < ratios[f"{name}, balanced, weights"] for name in TRAININGS)
    assert len(kept["times"]) == 2 * len(PRESETS)
