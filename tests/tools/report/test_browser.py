"""The page in a browser: what is drawn, and what mouse and keyboard show. Skipped where there is no Chromium."""

import itertools
import json
import math
import os
import re
import shutil
import struct
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.tools.report.run_folders import HOSTILE, train_record, write_run
from trainer.tools.report import drawing
from trainer.tools.report.page import render
from trainer.tools.report.run import labels, read_run

pytest.importorskip("bokeh", reason="the page needs the package bokeh")
playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright")

STEPS = 120
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Promise that ends when the browser has drawn what an event has changed."""


def chromium_path(own: str) -> str:
    """Return the path of Chromium: of the system, or playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next((path for name in names if (path := shutil.which(name))), own)
    if not os.path.exists(found):
        pytest.skip("no Chromium is installed")
    return found


_LONGEST_MS = 120_000
"""Time limit of each wait. A page takes seconds on a machine whose cores run other tests."""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Containers rarely allow the sandbox, and the page is our own.
        path = chromium_path(driver.chromium.executable_path)
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=_LONGEST_MS)
        playwright.expect.set_options(timeout=_LONGEST_MS)
        yield browser
        browser.close()


def losses(factor: float) -> dict[int, float | None]:
    values = {step: factor * (3.0 + math.cos(step) / 7) for step in range(1, STEPS + 1)}
    return values | {60: None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs, one of them with a hostile name. The page marks a checkpoint of the second."""
    folder = tmp_path_factory.mktemp("runs")
    names = {"first": 1.0, "second": 1.5, HOSTILE.replace("/", "-"): 2.0}
    save = {"kind": "checkpoint", "step": 50, "blocked_s": 0.5}
    return [
        write_run(
            folder / name,
            [*(train_record(step, loss, tokens_seen=64 * step) for step, loss in losses(factor).items()), save],
            ["--optimizer.lr", str(factor / 100)],
        )
        for name, factor in names.items()
    ]


@pytest.fixture(scope="module")
def page(browser, runs, tmp_path_factory):
    """The page of the runs, and the messages of its console."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    marked = [0, 40, 0]
    loaded = [read_run(*of_run) for of_run in zip(runs, labels(runs), marked, strict=True)]
    file.write_text(render(loaded, [None] * len(loaded)))
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_default_timeout(_LONGEST_MS)
    page.problems, page.requests = [], []
    page.on("console", lambda m: page.problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    return page


@pytest.fixture
def loss_plot(page):
    """The figure of the training loss, as it is after loading."""
    plot = page.locator("#plot-figure-0")
    plot.scroll_into_view_if_needed()
    page.get_by_role("button", name="Show all").click()
    return plot


def shown(page) -> tuple[int, list[str]]:
    """Return the step and the values that the figure of the loss shows."""
    step = re.fullmatch(r"at step ([\d,]+)", page.locator("#at-figure-0").inner_text())
    return int(step[1].replace(",", "")), page.locator("#legend-figure-0 output").all_inner_texts()


def recorded(runs, step: int) -> list[float | None]:
    """Return the losses of a step in metrics.jsonl."""
    records = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in runs]
    return [next(r["loss"] for r in of_run if r["kind"] == "train" and r["step"] == step) for of_run in records]


def zoomed(page) -> tuple[int, int]:
    return tuple(int(page.locator(f"#zoom input[name={name}]").input_value()) for name in ("from", "to"))


def expect_zoom(page, first, last):
    """Wait until the page shows these steps, and fail if it does not."""
    for name, step in (("from", first), ("to", last)):
        playwright.expect(page.locator(f"#zoom input[name={name}]")).to_have_value(str(step))


def test_no_error_and_no_request_but_the_page(page):
    assert page.problems == []
    assert [url.partition(":")[0] for url in page.requests] == ["file"]
    assert page.title().startswith("Report of first, second, <script>")


PAINTED = """plot => {
    const found = new Set();
    for (const canvas of plot.firstChild.shadowRoot.querySelector(".bk-Canvas").shadowRoot.querySelectorAll("canvas")) {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 250) found.add([...data.slice(i, i + 3)].map((c) => c.toString(16).padStart(2, "0")).join(""));
    }
    return [...found];
}"""
"""Function that returns the opaque colours of a figure's canvases."""


def test_every_figure_is_drawn_in_the_colors_of_its_lines(page):
    plots = {plot.get_attribute("id"): set(plot.evaluate(PAINTED)) for plot in page.locator(".plot").all()}
    css = (Path(drawing.__file__).parent / "page.css").read_text()
    light = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", css[: css.index("@media")]))
    assert len(plots) == 7
    for name, painted in plots.items():
        found = {color for color, value in light.items() if value in painted}
        if name == "plot-figure-1":  # learning rate: the lines are equal, and the last one lies on top
            assert found >= {"run-2"}
        elif name in ("plot-figure-3", "plot-figure-4", "plot-figure-5"):
            assert found >= {"phase-0", "phase-1", "phase-2"}, name
        elif name in ("plot-figure-0", "plot-figure-events"):
            assert found >= {"run-0", "run-1", "run-2"}, name
        else:
            assert found & {"run-0", "run-1", "run-2"}, name


@pytest.mark.parametrize("share", [0.2, 0.45, 0.5, 0.9])
def test_the_values_under_the_mouse_are_those_of_metrics_jsonl(page, runs, loss_plot, share):
    box = loss_plot.bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + 80)
    page.evaluate(FRAMES)
    step, values = shown(page)
    assert [float(value) for value in values] == recorded(runs, step)


def test_the_keyboard_reads_all_values_and_says_them(page, runs, loss_plot):
    loss_plot.focus()
    page.keyboard.press("Home")
    assert shown(page)[0] == 1
    for _ in range(59):
        page.keyboard.press("ArrowRight")
    assert shown(page) == (60, ["not finite"] * 3)
    page.keyboard.press("ArrowLeft")
    assert [float(value) for value in shown(page)[1]] == recorded(runs, 59)
    assert page.locator("#spoken").inner_text().startswith(f"step 59: first {recorded(runs, 59)[0]}, second ")


def test_a_drag_zooms_all_figures_and_a_double_click_shows_all(page, loss_plot):
    box = loss_plot.bounding_box()
    expect_zoom(page, 1, STEPS)
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 92, steps=4)
    page.mouse.up()
    playwright.expect(page.locator("#zoom input[name=from]")).not_to_have_value("1")
    first, last = zoomed(page)
    assert 20 < first < last < 90
    loss_plot.dblclick(position={"x": 200, "y": 80})
    expect_zoom(page, 1, STEPS)


def test_the_form_zooms_to_steps(page, loss_plot):
    page.get_by_label("Steps from").fill("30")
    page.get_by_label("to", exact=True).fill("40")
    page.get_by_role("button", name="Zoom").click()
    expect_zoom(page, 30, 40)
    ticks = "Bokeh.documents[0].get_model_by_name('figure-0').below[0].ticker.get_ticks(30, 32, null, 0).major"
    assert page.evaluate(ticks) == [30, 31, 32]
    loss_plot.focus()
    page.keyboard.press("Escape")
    expect_zoom(page, 1, STEPS)


MARK = "Bokeh.documents[0].get_model_by_name('figure-0').center.find(({ type }) => type === 'Span')"


def test_a_run_can_be_hidden(page, loss_plot):
    legend = page.locator("#legend-figure-0 li:visible")
    assert legend.count() == 4 and page.evaluate(f"{MARK}.visible")
    page.get_by_role("checkbox", name="second").uncheck()
    assert legend.count() == 3 and not page.evaluate(f"{MARK}.visible")
    page.get_by_role("checkbox", name="second").check()
    assert legend.count() == 4


def test_the_colors_follow_the_scheme_of_the_reader(page):
    color = "Bokeh.documents[0].get_model_by_name('figure-0').renderers[1].glyph.line_color.value"
    color = f"[{color}, {MARK}.line_color, {MARK}.location]"
    before = page.evaluate(color)
    page.emulate_media(color_scheme="dark")
    page.evaluate(FRAMES)
    after = page.evaluate(color)
    page.emulate_media(color_scheme="light")
    assert (before, after) == (["#0b62a4", "#b93c08", 40], ["#6cb6ff", "#ffa05c", 40])


def test_a_figure_can_be_saved_in_the_light_colors_whatever_the_scheme(page):
    page.emulate_media(color_scheme="dark")
    saved = {}
    for kind in ("svg", "png"):
        with page.expect_download() as download:
            page.locator(f"figure:has(#plot-figure-0) button[data-save={kind}]").click()
        saved[kind] = download.value
    page.emulate_media(color_scheme="light")
    svg = Path(saved["svg"].path()).read_text()
    root = ElementTree.fromstring(svg)
    assert saved["svg"].suggested_filename == "Training_loss_nats.svg"
    assert {"Training loss (nats)", "first", "second", "60"} <= {element.text for element in root.iter()}
    assert "#0b62a4" in svg and not re.search(r"#6cb6ff|rgb\(108, ?182, ?255", svg)
    content = Path(saved["png"].path()).read_bytes()
    size = struct.unpack(">II", content[16:24])
    assert content[1:4] == b"PNG" and size == tuple(2 * int(root.get(key)) for key in ("width", "height"))


def test_on_paper_every_figure_is_a_picture_that_fits(page):
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 900})
    plots = page.locator("section figure .plot").all()
    seen = [
        plot.evaluate("e => [...e.children].filter((c) => c.getBoundingClientRect().width).map((c) => c.nodeName)")
        for plot in plots
    ]
    width = page.evaluate("document.documentElement.scrollWidth")
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1000, "height": 900})
    assert seen == [["svg"]] * 7 and width <= 700


def choose(page, **values):
    for name, value in values.items():
        control = page.locator(f"#controls [name={name}]")
        if isinstance(value, bool):
            control.set_checked(value)
        elif name == "filter":
            control.fill(value)
        else:
            control.select_option(value)
    page.evaluate(FRAMES)


def y_axis(page, figure="figure-0"):
    model = f"Bokeh.documents[0].get_model_by_name('{figure}')"
    return page.evaluate(
        f"[{model}.y_scale.type, {model}.y_range.start, {model}.y_range.end, {model}.left[0].ticker.type]"
    )


def test_the_axis_may_be_logarithmic(page, loss_plot):
    choose(page, log=True)
    kind, start, end, ticker = y_axis(page)
    choose(page, log=False)
    assert (kind, ticker) == ("LogScale", "LogTicker") and 2 < start < 3 and 6 < end < 7
    assert y_axis(page)[::3] == ["LinearScale", "BasicTicker"]


@pytest.mark.parametrize(
    ("unit", "last", "said"),
    [("tokens", 120 * 64, "at 7,680 tokens"), ("hours", 120 * 2 / 3600, "at 0.067 hours of steps")],
)
def test_the_curves_may_be_drawn_over_tokens_or_hours(page, loss_plot, unit, last, said):
    choose(page, axis=unit)
    shown = float(page.locator("#zoom input[name=to]").input_value())
    loss_plot.focus()
    page.keyboard.press("End")
    text = page.locator("#at-figure-0").inner_text()
    page.keyboard.press("Escape")
    label = page.evaluate("Bokeh.documents[0].get_model_by_name('figure-0').below[0].axis_label")
    choose(page, axis="steps")
    assert label == said.partition(" ")[2].partition(" ")[2]
    assert shown == pytest.approx(last, rel=1e-5) and text == said
    expect_zoom(page, 1, STEPS)


def test_figures_are_filtered_by_words_of_their_titles(page):
    titles = page.locator("figure:visible h3")
    every = titles.count()
    choose(page, filter="LOSS train")
    found = titles.all_inner_texts()
    groups = page.locator("section:has(figure):visible").count()
    choose(page, filter="")
    assert found == ["Training loss (nats)"] and groups == 1 and titles.count() == every


def test_the_table_of_runs_is_sorted_by_a_click(page):
    rows, button = (
        page.locator("table.sorted tbody tr th"),
        page.get_by_role("button", name="Training loss", exact=True),
    )
    orders = []
    for _ in range(2):
        button.click()
        orders.append([text.strip() for text in rows.all_inner_texts()])
    assert orders[0][:2] == ["first", "second"] and orders[1] == orders[0][::-1]
    page.get_by_role("button", name="optimizer.lr").click()
    assert rows.first.inner_text().strip() == "first"
    assert page.locator("table.sorted th[aria-sort]").get_attribute("aria-sort") == "ascending"


# ---- other pages


@pytest.fixture
def other_page(page, tmp_path):
    """Function that opens the page of runs in the same tab. Each run is a list of records."""
    first = page.url

    def open_page(*of_runs):
        loaded = [read_run(write_run(tmp_path / f"run{i}", records), f"run{i}") for i, records in enumerate(of_runs)]
        (tmp_path / "report.html").write_text(render(loaded, [None] * len(loaded)))
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    page.goto(first)
    page.wait_for_selector("html[data-ready]")
    assert page.problems == []


def test_a_page_does_not_take_over_what_was_chosen_on_another(page, loss_plot, other_page):
    choose(page, axis="tokens", filter="loss", log=True)
    page.get_by_role("checkbox", name="second").uncheck()
    other = other_page([train_record(step) for step in (1, 2)], [train_record(step) for step in (1, 2)])
    assert other.locator("#controls [name=axis]").input_value() == "steps"
    assert other.locator("#controls [name=filter]").input_value() == ""
    assert other.locator("input[data-run]:checked").count() == 2


def test_the_choices_on_a_page_are_kept_while_its_tab_is_open(page, loss_plot):
    choose(page, axis="tokens", log=True)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#controls [name=axis]").input_value() == "tokens" and y_axis(page)[0] == "LogScale"
    choose(page, axis="steps", log=False, filter="")
    page.get_by_role("checkbox", name="second").check()


def test_runs_without_records_or_with_one_are_shown(other_page):
    assert other_page([]).locator("figure").count() == 0
    assert other_page([train_record(7, 2.5)]).locator("figure .plot").count() == 2


def test_a_run_without_tokens_is_not_drawn_over_tokens(other_page):
    with_tokens = [train_record(step, 2.0, tokens_seen=100 * step) for step in (1, 2, 3)]
    page = other_page(with_tokens, [train_record(step, 9.0) for step in (1, 2, 3)])
    choose(page, axis="tokens")
    page.locator("#plot-figure-0").focus()
    page.keyboard.press("End")
    assert page.locator("#legend-figure-0 output").all_inner_texts() == ["2", ""]
    assert y_axis(page)[2] < 3
    choose(page, axis="steps")


def test_the_axis_of_the_phases_fits_what_is_visible(other_page):
    slow = {f"{phase}_time_s": 100.0 for phase in ("data", "forward", "backward")}
    page = other_page([train_record(step, **(slow if step == 1 else {})) for step in range(1, 61)])
    name = page.locator("figure:has(.legend.stack) .plot").first.get_attribute("id").removeprefix("plot-")
    page.get_by_label("to", exact=True).fill("60")
    page.get_by_label("Steps from").fill("50")
    page.get_by_role("button", name="Zoom").click()
    page.evaluate(FRAMES)
    assert 2 < y_axis(page, name)[2] < 3


# ---- functions of curves.js


def test_groups_have_the_extremes_and_means_of_their_values(page):
    y = np.random.default_rng(0).normal(size=1003)
    y[[5, 700]] = math.nan
    found = page.evaluate(
        "y => curves.grouped(y.map((_, i) => i), y.map((v) => v ?? NaN), 150)",
        [None if math.isnan(v) else v for v in y],
    )
    edges = [group * len(y) // 150 for group in range(151)]
    parts = [y[a:b] for a, b in itertools.pairwise(edges)]
    for name, function in (("low", np.nanmin), ("high", np.nanmax), ("mean", np.nanmean)):
        np.testing.assert_allclose(found[name], [function(part) for part in parts], rtol=1e-12)
    assert found["x"] == [edge - 1 for edge in edges[1:]]


@pytest.mark.parametrize("window", [1, 2, 10, 101, 5000])
def test_a_moving_mean_has_the_values_around_it(page, window):
    y = np.random.default_rng(1).normal(size=300)
    found = page.evaluate("([y, width]) => [...curves.moving(y.map((_, i) => i + 1), y, width)]", [y.tolist(), window])
    steps = np.arange(1, 301)
    expected = [y[(steps > step - window / 2) & (steps <= step + window / 2)].mean() for step in steps]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_moving_mean_counts_steps_and_forgets_a_huge_value(page):
    steps = [*range(1, 101), *range(200, 1100, 100)]
    y = [1.5] * len(steps)
    y[10] = 1e18
    found = page.evaluate("([steps, y]) => [...curves.moving(steps, y, 20)]", [steps, y])
    assert found[25:] == [1.5] * len(steps[25:]) and found[8] > 1e16


@pytest.mark.parametrize(
    ("axis", "start", "end", "expected"),
    [("steps", 0, 9, "0,0"), ("tokens", 0, 5e9, "0,0.0a"), ("tokens", 3e9, 3.02e9, "0,0.000a"), ("tokens", 0, 900, "0,0a"),
     ("hours", 0, 100, "0,0"), ("hours", 0, 0.002, "0,0.0000")],
)  # fmt: skip
def test_the_numbers_of_an_axis_have_the_decimals_that_distinguish_them(page, axis, start, end, expected):
    assert page.evaluate("([axis, start, end]) => curves.tickFormat(axis, start, end)", [axis, start, end]) == expected


@pytest.mark.parametrize("values", [[3.5, 3, 2.5, 2], [4, 3.5, 3, 2.5, 2], [1.0], [1.0] * 20, []])
def test_a_line_without_spikes_keeps_all_values(page, values):
    assert page.evaluate("y => curves.withoutSpikes(y)", values) == values


@pytest.mark.parametrize(
    ("values", "is_log", "start", "end"),
    [
        ([2.25, 2.25], False, 2.025, 2.475),
        ([0.0, 0.0], False, 0.0, 1.0),
        ([-3.0], False, -3.3, -2.7),
        ([0.0, 100.0], False, 0.0, 105.0),
        ([-1.0, 1.0], False, -1.1, 1.1),
        ([1.0, 100.0], True, 100**-0.05, 100**1.05),
        ([], False, 0.0, 1.0),
    ],
)
def test_the_range_of_an_axis(page, values, is_log, start, end):
    found = page.evaluate("([values, isLog]) => curves.range(values, isLog)", [values, is_log])
    assert (found["start"], found["end"]) == pytest.approx((start, end))


def test_single_spikes_are_left_out_and_a_steep_beginning_is_not(page):
    step = np.arange(1, 2001)
    y = 1.5 + 9 / np.sqrt(step) + np.random.default_rng(2).normal(size=2000) / 20
    spikes = {400: 80.0, 1200: 35.0, 1998: -20.0}
    for index, value in spikes.items():
        y[index] = value
    kept = page.evaluate("y => curves.withoutSpikes(y)", y.tolist())
    assert not set(spikes.values()) & set(kept) and kept[:2] == y[:2].tolist() and len(kept) > 1980


def test_a_narrow_screen_needs_no_horizontal_scrolling(page):
    page.set_viewport_size({"width": 360, "height": 700})
    width = 1000
    for _ in range(100):  # the figures follow the window in later frames
        page.evaluate(FRAMES)
        width = page.evaluate("document.documentElement.scrollWidth")
        if width <= 360:
            break
    page.set_viewport_size({"width": 1000, "height": 900})
    assert width <= 360
