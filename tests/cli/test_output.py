"""Tables of the command line."""

import pytest

from dynaquant.cli import main, output


@pytest.mark.parametrize("columns", ["200", "60", "40"])
def test_a_large_table_looks_as_a_small_one(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    table = output.Table("name", "size", "", "other", optional=("other",))
    for i in range(12):
        table.add(f"model.layers.{'x' * 30}.é{i}", f"{i:,} MB", "–" * i, "")
    output.print_(table)
    wanted = capsys.readouterr().out
    monkeypatch.setattr(output, "MOST_BY_RICH", 3)
    output.print_(table)
    assert capsys.readouterr().out == wanted


def test_no_name_controls_the_terminal(capsys):
    table = output.Table("name")
    table.add("weight\x1b[2J\n")
    output.print_(table)
    output.print_("first\x07\nsecond ×")
    shown = capsys.readouterr().out
    assert "weight\\x1b[2J\\n" in shown
    assert "first\\x07\nsecond ×\n" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_no_name_in_an_error_controls_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dynaquant", "log", str(tmp_path / "run\x1b[2J")])
    with pytest.raises(SystemExit):
        main()
    assert "run\\x1b[2J does not exist" in capsys.readouterr().err
