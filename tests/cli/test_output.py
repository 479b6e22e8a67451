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


@pytest.mark.parametrize("columns", range(8, 60))
@pytest.mark.parametrize("most_by_rich", [0, 200])
def test_a_narrow_table_cuts_no_number(columns, most_by_rich, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(output, "MOST_BY_RICH", most_by_rich)
    table = output.Table("step", "tags", "size", "degradation", optional=("size",))
    row = ("1000", "best", "11.23 kB", "+10.12%")
    table.add(*row)
    output.print_(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [cell for cell in lines[3].strip("│").replace(" kB", "_kB").split() if cell != "│"] == [
        cell.replace(" ", "_") for cell in row if cell in lines[3]
    ]
    assert "1000" in lines[3]


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
