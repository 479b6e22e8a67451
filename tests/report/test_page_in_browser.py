"""The page of a report in a real browser: charts, legibility, printing, no network."""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import call, data
from report_values import at, save, statistics
from reported import SAVES, train_reported
from torch import nn

import dynaquant as dq
from dynaquant.report.charts import charts
from dynaquant.store.run import Run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed (pip install playwright)"
    ),
]

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CHARTS = ["sizes", "ratios", "degradation", "configuration", "bits", "seconds", "restore"]

# The contrast (WCAG 2) of every element with text of its own against its background.
CONTRASTS = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = rgb => {
    const [r, g, b] = rgb.slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = channels(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (["SCRIPT", "STYLE"].includes(e.tagName) || e.closest(".modebar, .hoverlayer")) continue;
    if (![...e.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(e);
    if (style.display === "none") continue;
    const [a, b] = [light(channels(e instanceof SVGElement ? style.fill : style.color)), light(behind(e))];
    found.push({text: e.textContent.trim(), contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)});
  }
  return found;
}"""
DRAWN = """() => Object.fromEntries([...document.querySelectorAll(".chart")].map(chart => {
  const box = chart.querySelector(".main-svg").getBoundingClientRect();
  const marks = [...chart.querySelectorAll(".overplot path, .overplot image")]
    .map(mark => mark.getBoundingClientRect()).filter(mark => mark.width > 0 || mark.height > 0);
  return [chart.id, {width: box.width, height: box.height, marks: marks.length}];
}))"""

# What lies under the tool bar of each chart, which is shown while the pointer is over the chart.
COVERED = """() => Object.fromEntries([...document.querySelectorAll(".chart")].map(chart => {
  const bar = chart.querySelector(".modebar").getBoundingClientRect();
  const under = box => box.left < bar.right && box.right > bar.left && box.top < bar.bottom && box.bottom > bar.top;
  const drawn = [...chart.querySelectorAll(".nsewdrag, .legendtext, .infolayer text, .xtick text, .ytick text")];
  return [chart.id, drawn.filter(e => under(e.getBoundingClientRect())).map(e => e.textContent || "the chart itself")];
}))"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "small-gpt"
    train_reported(folder)
    return folder


@pytest.fixture(scope="module")
def report(run) -> Path:
    out = run.with_name("report.html")
    call("report", run, "-o", out)
    return out


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, file: Path, viewport=DESKTOP, scheme="light") -> Iterator:
    """The page with all charts drawn. Fails if the browser reports an error or requests anything but the file."""
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    until(page, "[...document.querySelectorAll('.chart')].every(c => c.querySelector('.main-svg'))")
    yield page
    page.close()
    assert said == []
    # Data embedded in the page also has URLs (``data:``).
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [file.as_uri()]


def until(page, condition: str) -> None:
    """Wait until a condition is true. (The page's content security policy forbids playwright's own way.)"""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never came true: {condition}")


def illegible(page) -> list[dict]:
    found = page.evaluate(CONTRASTS)
    assert len(found) > 100
    return [element for element in found if element["contrast"] < 4.5]


def test_every_chart_is_drawn(browser, report):
    with opened(browser, report) as page:
        drawn = page.evaluate(DRAWN)
    assert list(drawn) == CHARTS
    for key, chart in drawn.items():
        assert chart["width"] > 400, key
        assert chart["height"] > 200, key
        assert chart["marks"] >= (1 if key == "bits" else SAVES), key


def test_table_and_charts_agree_with_the_log(browser, report, run):
    with opened(browser, report) as page:
        lines = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.chart')].flatMap(c => c.data).map(t => [t.name, t.y]))"
        )
        rows = page.evaluate(
            "[...document.querySelectorAll('tbody tr')].map(row => Object.fromEntries("
            "[...row.querySelectorAll('data')].map(d => [d.dataset.field, [d.value, d.innerText]])))"
        )
    records = data("log", run)
    assert lines["whole state"] == [record["total"]["raw"] / record["total"]["stored"] for record in records]
    assert lines["measured"] == [record["quality"]["degradation"] for record in records]
    assert len(rows) == len(records) == SAVES
    for row, record in zip(rows, records, strict=True):
        assert {field: json.loads(value) for field, (value, _) in row.items()} == {
            field: at(record, field) for field in row
        }
        text = {field: shown for field, (_, shown) in row.items()}
        assert text["step"] == str(record["step"])
        assert text["total.stored"].replace(",", "") == str(record["total"]["stored"])
        assert text["quality.degradation"] == f"{record['quality']['degradation']:+.2%}"
        assert text["limit"] == f"{record['limit']:.2%}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_light_and_dark_mode(browser, report, scheme):
    with opened(browser, report, scheme=scheme) as page:
        assert illegible(page) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(245, 246, 248)" if scheme == "light" else "rgb(16, 19, 23)"
        )


def test_the_page_follows_a_switch_to_dark_mode(browser, report):
    with opened(browser, report) as page:
        page.emulate_media(color_scheme="dark")
        assert illegible(page) == []


def test_the_text_at_the_pointer_is_legible(browser, report, run):
    with opened(browser, report, scheme="dark") as page:
        page.hover("#ratios .drag.nsewdrag")
        page.wait_for_selector("#ratios .hoverlayer .legend text")
        size = data("log", run)[SAVES // 2]["total"]  # the pointer is in the middle
        said = page.eval_on_selector_all("#ratios .hoverlayer text", "texts => texts.map(text => text.textContent)")
        assert said[0].startswith("step ")
        assert said[1] == f"whole state: {size['raw'] / size['stored']:.2f}×"
        fill = page.evaluate("getComputedStyle(document.querySelector('#ratios .hoverlayer text')).fill")
        ground = page.evaluate("getComputedStyle(document.querySelector('#ratios .hoverlayer rect.bg')).fill")
        assert (fill, ground) == ("rgb(28, 31, 36)", "rgb(255, 255, 255)")


@pytest.mark.parametrize("viewport", [PHONE, {"width": 800, "height": 600}, DESKTOP])
def test_the_page_is_no_wider_than_the_window(browser, report, viewport):
    with opened(browser, report, viewport) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        widths = page.evaluate(DRAWN)
        assert all(chart["width"] < viewport["width"] for key, chart in widths.items() if key != "bits")


def test_no_button_uploads_a_chart(browser, report):
    with opened(browser, report) as page:
        offered = page.eval_on_selector_all("#sizes .modebar-btn", "buttons => buttons.map(b => b.dataset.title)")
    assert offered == ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]


def test_the_tool_bar_covers_neither_the_legend_nor_what_is_drawn(browser, report):
    with opened(browser, report) as page:
        covered = page.evaluate(COVERED)
    assert [covered[key] for key in CHARTS] == [[]] * len(CHARTS)


def test_charts_shrink_with_the_window(browser, report):
    with opened(browser, report) as page:
        page.set_viewport_size(PHONE)
        until(page, "document.querySelector('#sizes .main-svg').clientWidth < 390")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_the_page_prints_in_light_colours_and_fits_the_paper(browser, report):
    with opened(browser, report, scheme="dark") as page:
        # Added after the page's own listener, so that it sees what will be printed.
        page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = ({DRAWN})(); }})")
        pdf = page.pdf(prefer_css_page_size=True)
        printed = page.evaluate("window.printed")
        assert pdf.startswith(b"%PDF")
        assert {key: chart["width"] for key, chart in printed.items()} == dict.fromkeys(CHARTS, 670)
        until(page, "document.querySelector('#sizes .main-svg').clientWidth < 600")  # as before
        page.emulate_media(media="print")
        assert illegible(page) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.is_visible(".modebar-container")
        apart = page.evaluate(
            "[...document.querySelectorAll('.grid section')].map(s => getComputedStyle(s).breakInside)"
        )
        assert set(apart) == {"avoid"}


def test_markup_in_names_is_shown_as_text(browser, tmp_path):
    hostile = "</script><script>alert(1)</script><img src='https://example.com/x'><b>bold</b>"
    model = nn.Linear(8, 8)
    model.register_parameter(hostile.replace(".", "·"), nn.Parameter(model.weight.detach().clone()))
    save(tmp_path / "run", model, 1, 2, quality=dq.Quality(configuration=dq.GridConfiguration(scale=-80)))
    out = tmp_path / "report.html"
    call("report", tmp_path / "run", "-o", out)
    with opened(browser, out) as page:
        labels = page.eval_on_selector_all("#bits .ytick text", "labels => labels.map(label => label.textContent)")
        assert labels[-1].startswith("…")
        assert labels[-1].endswith("<b>bold</b>")
        page.hover("#bits .drag.nsewdrag", position={"x": 200, "y": 200})
        assert "</script>" in page.wait_for_selector("#bits .hoverlayer text").text_content()


def test_a_lossless_run_of_one_checkpoint_has_a_page(browser, tmp_path):
    save(tmp_path / "run", nn.Linear(8, 8), 1, quality="lossless")
    out = tmp_path / "report.html"
    call("report", tmp_path / "run", "-o", out)
    expected = [chart.key for chart in charts(statistics(tmp_path / "run")) if chart.figure is not None]
    assert "configuration" not in expected
    for viewport in (PHONE, DESKTOP):
        with opened(browser, out, viewport) as page:
            assert list(page.evaluate(DRAWN)) == expected
            assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_a_screenshot_can_be_taken(browser, report, run, tmp_path):
    """From the top to the heat map. CONTRIBUTING.md says how this makes the README's picture, of the demo's report."""
    out = Path(os.environ.get("DYNAQUANT_SCREENSHOT", tmp_path / "report.png"))
    shown = Path(os.environ.get("DYNAQUANT_REPORT", report)).absolute()
    with opened(browser, shown) as page:
        box = page.locator("section", has=page.locator("#bits")).bounding_box()
        clip = {"x": 0, "y": 0, "width": DESKTOP["width"], "height": box["y"] + box["height"] + 12}
        page.screenshot(path=out, full_page=True, clip=clip)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 50_000
    assert len(Run(run).summaries()[0]) == SAVES
