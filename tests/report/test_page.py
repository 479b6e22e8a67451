"""The statistics and the page of a report, without a browser."""

import json
import math
import re
from functools import partial
from html import unescape

import pytest
import torch
from commands import call, data, failed, make_run
from report_values import at, save, statistics
from reported import EVERY, RESTORED_AFTER, SAVES, train_reported
from rewritten import with_record
from torch import nn
from training import model_of, train
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.formatting import duration, in_bytes, in_seconds, percent, plural, times
from dynaquant.report.charts import LABEL, MOST_TENSORS, charts
from dynaquant.report.page import page_of
from dynaquant.report.statistics import Statistics
from dynaquant.store.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported")
    train_reported(folder)
    return folder


@pytest.fixture
def fails(monkeypatch, capsys):
    return partial(failed, monkeypatch, capsys)


def drawn(found: Statistics) -> dict:
    return {chart.key: chart for chart in charts(found)}


def cells(page: str) -> list[dict]:
    """The values in the table of a page, one dict for each checkpoint, with the keys of ``log --json``."""
    found = []
    for row in re.findall(r"<tr>(<td.*?)</tr>", page, re.DOTALL):
        fields = re.findall(r'<data data-field="([^"]*)" value="([^"]*)">', row)
        found.append({field: json.loads(unescape(value)) for field, value in fields})
    return found


def test_the_statistics_agree_with_the_log(run):
    found, records = statistics(run), data("log", run)
    assert [row.record.step for row in found.rows] == [EVERY * (i + 1) for i in range(SAVES)]
    assert found.whole.stored == sum(file.stat().st_size for file in run.iterdir())
    assert found.whole.raw == sum(record["total"]["raw"] for record in records)
    assert found.weights.stored == sum(record["roles"]["weight"]["stored"] for record in records)
    assert found.worst == max(record["quality"]["degradation"] for record in records) <= 0.01
    assert found.seconds.keys() == {"wait", "capture", "search"}
    assert found.seconds["search"] == pytest.approx(sum(record["seconds"]["search"] for record in records))
    assert found.skipped == ()


def test_ratios_of_a_whole_run_reach_70_percent_of_the_measured_ones(run):
    found = statistics(run)
    assert found.whole.ratio > 0.7 * 20
    assert found.weights.ratio > 0.7 * 14.6


def test_bits_agree_with_show_and_keep_the_order_of_the_model(run):
    found = statistics(run)
    shown = [tensor for tensor in data("show", run, EVERY)["tensors"] if tensor["role"] == "weight"]
    assert [(name, info.bits) for name, info in found.rows[0].weights.items()] == [
        (tensor["name"], tensor["bits"]) for tensor in shown
    ]
    assert found.tensors == [tensor["name"] for tensor in shown]


def test_a_restore_reads_the_chain_back_to_the_keyframe(run):
    found = statistics(run)
    assert [row.restore.files for row in found.rows] == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2]
    sizes = [row.record.total.stored for row in found.rows]
    assert found.rows[6].restore.size == sizes[6]  # a keyframe is read whole
    assert max(sizes[6:8]) < found.rows[7].restore.size <= sum(sizes[6:8])


def test_the_charts_show_the_records(run):
    found, records = drawn(statistics(run)), data("log", run)
    assert all(chart.figure is not None for chart in found.values())
    lines = {trace.name: list(trace.y) for chart in found.values() for trace in chart.figure.data}
    assert lines["whole state"] == [record["total"]["raw"] / record["total"]["stored"] for record in records]
    assert lines["measured"] == [record["quality"]["degradation"] for record in records]
    assert lines["limit"] == [record["limit"] for record in records]
    assert lines["scale of the grids"] == [record["configuration"]["scale"] / 16 for record in records]
    assert lines["search"] == [record["seconds"]["search"] for record in records]
    dithered = [height is not None for height in lines["stochastic rounding"]]
    assert dithered == [record["configuration"]["dithered"] for record in records]
    assert any(dithered[RESTORED_AFTER:])
    stacked = [trace for trace in found["sizes"].figure.data if trace.type == "bar"]
    for i, record in enumerate(records):
        assert sum(trace.y[i] for trace in stacked) * 1000 == pytest.approx(record["total"]["stored"])


def test_the_table_of_the_page_agrees_with_the_log(run):
    table, records = cells(page_of(statistics(run))), data("log", run)
    assert len(table) == len(records) == SAVES
    for found, record in zip(table, records, strict=True):
        assert len(found) == 11
        assert found == {field: at(record, field) for field in found}


def test_the_table_shows_tags(tmp_path):
    save(tmp_path, model_of(), 1, 2)
    call("tag", tmp_path, "best", 1)
    call("tag", tmp_path, "before-decay", 1)
    page = page_of(statistics(tmp_path))
    assert [row["tags"] for row in cells(page)] == [["before-decay", "best"], []]
    assert ">before-decay, best<" in page


def test_the_command_writes_one_file_and_replaces_another_only_with_force(run, tmp_path, fails):
    out = tmp_path / "report.html"
    printed = call("report", run, "-o", out)
    assert printed.startswith(f"{out}: {SAVES} checkpoints, ")
    assert list(tmp_path.iterdir()) == [out]
    out.write_text("precious")
    fails("exists", "report", run, "-o", out)
    assert out.read_text() == "precious"
    call("report", run, "-o", out, "--force")
    assert out.read_text() != "precious"
    fails("is a folder", "report", run, "-o", tmp_path, "--force")
    fails("is not a folder; create it first", "report", run, "-o", tmp_path / "nowhere" / "report.html")
    fails("does not exist", "report", tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == [out]


def test_names_are_not_interpreted_as_markup(tmp_path):
    hostile = "</script><script>alert(1)</script><b>bold</b>&lt;"
    model = nn.Linear(8, 8)
    model.register_parameter(hostile, nn.Parameter(torch.randn(8, 8)))
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    save(folder, model, 1, 2, quality=dq.Quality(configuration=dq.GridConfiguration(scale=-80)))
    for step in (1, 2):
        with_record(Run(folder).path(step), notes=[hostile], seconds={hostile: 1.0})
    found = statistics(folder)
    assert f"model.{hostile}" in found.tensors
    page = page_of(found)
    # Without plotly's own source: the text of the page and the figures.
    own = page[: page.index("plotly.js v")] + page[page.index('id="figures"') :]
    assert own.count("<script") == 2
    assert own.count("</script>") == 2
    for markup in ("alert(1)</script>", "<script>alert", "<b>", "<img"):
        assert markup not in own
    label = drawn(found)["bits"].figure.layout.yaxis.ticktext[-1]
    assert "<" not in label
    assert unescape(label).endswith("</b>&lt;")


def test_a_lossless_run_has_no_configuration_and_no_metric(tmp_path):
    save(tmp_path, model_of(), 1, 2, quality="lossless")
    found = drawn(statistics(tmp_path))
    assert found["configuration"].figure is None
    assert "exact" in found["configuration"].text
    assert found["degradation"].figure is None
    assert found["bits"].figure is not None
    assert "no metric was given" in page_of(statistics(tmp_path))


def test_a_run_without_weights_has_no_heat_map(tmp_path):
    save(tmp_path, nn.Linear(4, 4), 1, roles={"*": "exact"})
    found = statistics(tmp_path)
    assert drawn(found)["bits"].figure is None
    assert cells(page_of(found))[0]["roles.weight.stored"] is None


def test_an_empty_model_has_a_page(tmp_path):
    with dq.Checkpointer(tmp_path, nn.ReLU()) as ckpt:
        ckpt.save(0).result()
    assert len(cells(page_of(statistics(tmp_path)))) == 1


def test_one_checkpoint_is_enough(tmp_path):
    save(tmp_path, model_of(), 7, evaluate=lambda model: float(model[1].weight.detach().norm()))
    page = page_of(statistics(tmp_path))
    assert "1 checkpoint, step 7" in page
    assert len(cells(page)) == 1


def test_checkpoints_without_a_metric_are_marked(tmp_path):
    model = model_of()
    save(tmp_path, model, 1, evaluate=lambda model: float(model[1].weight.detach().norm()))
    save(tmp_path, model, 2)
    degradation = drawn(statistics(tmp_path))["degradation"]
    assert "without a finite degradation: 1 of 2" in degradation.text
    cross = next(trace for trace in degradation.figure.data if trace.name == "no number")
    assert list(cross.x) == ["2"]
    assert "guided by distortion" in cross.customdata[0]


def test_a_metric_that_is_nan_counts_as_no_degradation(tmp_path):
    save(
        tmp_path,
        model_of(),
        1,
        2,
        quality=dq.Quality(configuration=dq.GridConfiguration(scale=-80)),
        evaluate=lambda _: math.nan,
    )
    quality = {"original": "nan", "restored": "nan", "degradation": "nan"}
    with_record(Run(tmp_path).path(2), quality=quality)
    found = statistics(tmp_path)
    assert found.worst is None
    assert "finite degradation" in drawn(found)["degradation"].text
    assert (
        cells(page_of(found))[1]["quality.degradation"] == "nan" == data("log", tmp_path)[1]["quality"]["degradation"]
    )


def test_the_published_method_has_bins_and_shares(tmp_path):
    make_run(tmp_path)
    configuration = drawn(statistics(tmp_path))["configuration"].figure
    assert {trace.name: trace.y[0] for trace in configuration.data} == {
        "bins": 16,
        "bins of embeddings": 16,
        "pruned": 0.1,
        "protected (outliers)": 0.005,
    }


def test_damaged_files_are_skipped_and_listed(tmp_path):
    make_run(tmp_path)
    path = Run(tmp_path).path(40)
    path.write_bytes(path.read_bytes()[:-5])
    with_record(Run(tmp_path).path(80), seconds="long")
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 0
    assert "skipped" in result.stderr
    page = out.read_text()
    assert [row["step"] for row in cells(page)] == [20, 60]
    reasons = unescape(page[page.index("<h2>Skipped") : page.index('<div class="grid">')])
    assert f"{path.name}: truncated" in reasons
    assert "step 60 is listed, but cannot be restored" in reasons
    assert "its record of the save cannot be understood" in reasons
    found = statistics(tmp_path)
    assert [row.restore and row.restore.files for row in found.rows] == [1, None]
    assert "1 checkpoint cannot be restored" in drawn(found)["restore"].text


def test_charts_are_sorted_by_step_after_a_training_went_back(tmp_path):
    model = model_of()
    with dq.Checkpointer(tmp_path, model) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step).result()
        ckpt.restore(step=10)
        ckpt.save(15).result()
    found = statistics(tmp_path)
    assert [row.record.step for row in found.rows] == [10, 20, 30, 15]
    assert list(drawn(found)["ratios"].figure.data[0].x) == ["10", "15", "20", "30"]


def test_the_lossless_copy_of_the_newest_checkpoint_takes_space_and_a_restore_reads_it(tmp_path):
    model = model_of()
    save(tmp_path, model, 1, 2, keep=dq.Keep(lossless_copy=True))
    found = statistics(tmp_path)
    copy = next(tmp_path.glob("exact-*"))
    assert found.lossless_copy == copy.stat().st_size == found.rows[1].restore.size
    assert [row.restore.files for row in found.rows] == [1, 1]
    assert "for the lossless copy" in page_of(found)


def test_if_there_are_many_tensors_the_largest_are_shown_in_the_order_of_the_model(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(MOST_TENSORS)))
    save(tmp_path, model, 1, quality=dq.Quality(configuration=dq.GridConfiguration(scale=-80)))
    found = statistics(tmp_path)
    assert len(found.tensors) == 2 * MOST_TENSORS
    chart = drawn(found)["bits"]
    shown = [row[0][0] for row in chart.figure.data[0].customdata]
    assert len(shown) == MOST_TENSORS
    assert shown == [name for name in found.tensors if name in shown]
    assert f"The {MOST_TENSORS} largest of {2 * MOST_TENSORS} tensors" in chart.text
    sizes = {name: info.size.stored for name, info in found.rows[0].weights.items()}
    assert max(sizes[name] for name in sizes if name not in shown) <= min(sizes[name] for name in shown)


def test_long_names_are_shortened_beside_the_heat_map_only(tmp_path):
    long = "block_with_a_long_name." * 4
    model = nn.Module()
    child = model
    for part in long.strip(".").split("."):
        child.add_module(part, nn.Module())
        child = child.get_submodule(part)
    child.add_module("linear", nn.Linear(4, 4))
    save(tmp_path, model, 1)
    heat = drawn(statistics(tmp_path))["bits"].figure
    assert all(len(label) == LABEL for label in heat.layout.yaxis.ticktext)
    assert heat.data[0].customdata[0][0][0] == f"model.{long}linear.weight"


def test_a_tensor_that_is_new_has_an_empty_cell_before(tmp_path):
    optimizer = torch.optim.AdamW((model := model_of()).parameters())
    train(model, optimizer)
    save(tmp_path, model, 1)
    save(tmp_path, nn.Sequential(*model, nn.Linear(40, 8)), 2)
    heat = drawn(statistics(tmp_path))["bits"].figure.data[0]
    assert heat.customdata[-1][0][0] == "model.5.bias"
    assert heat.z[-1][0] is None
    assert heat.z[-1][1] is not None


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 32), (torch.float16, 16)])
def test_a_tensor_of_a_few_values_does_not_stretch_the_colours_of_the_heat_map(tmp_path, dtype, most):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 4)).to(dtype)
    model[1].bias.data.copy_(torch.tensor([100.0, -3000.0, 25000.0, 7.0]))
    save(tmp_path, model, 1)
    found = statistics(tmp_path)
    bits = found.rows[0].weights["model.1.bias"].bits
    assert bits > 2 * most
    heat = drawn(found)["bits"].figure.data[0]
    assert heat.zmax == math.log2(most)
    assert heat.colorbar.ticktext[-1] == f"{most} or more"
    assert list(heat.customdata[-1][0]) == ["model.1.bias", f"{bits:.3f}"]


def test_numbers_are_formatted_for_people():
    assert [in_bytes(size) for size in (0, 999, 1234, 5.5e6)] == ["0 B", "999 B", "1.23 kB", "5.50 MB"]
    assert [percent(share, sign=True) for share in (0.0123, -0.5, None)] == ["+1.23%", "-50.00%", "–"]
    assert [percent(share) for share in (math.inf, -math.inf, math.nan)] == ["∞", "−∞", "not a number"]
    assert [times(ratio) for ratio in (1234.5, math.inf)] == ["1,234.50×", "∞"]
    assert [duration(s) for s in (-1, 59, 90, 4000, 86400 * 12)] == ["0 s", "59 s", "1.5 min", "1.1 h", "12 d"]
    assert [in_seconds(seconds) for seconds in (0, 0.01234, 5.94, 1234.5)] == ["0.0 s", "0.012 s", "5.9 s", "1,234.5 s"]
    assert [plural(count, "file") for count in (1, 2)] == ["1 file", "2 files"]
