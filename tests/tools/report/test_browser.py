"""The page in a browser: what is drawn, and what mouse and keyboard show. Skipped where there is no Chromium."""

import json
import math
import os
import re
import shutil
from pathlib import Path

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
        write_run(folder / name, [*(train_record(step, loss) for step, loss in losses(factor).items()), save])
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
    color = "Bokeh.documents[0].get_model_by_name('figure-0').renderers[0].glyph.line_color.value"
    color = f"[{color}, {MARK}.line_color, {MARK}.location]"
    before = page.evaluate(color)
    page.emulate_media(color_scheme="dark")
    page.evaluate(FRAMES)
    after = page.evaluate(color)
    page.emulate_media(color_scheme="light")
    assert (before, after) == (["#0b62a4", "#b93c08", 40], ["#6cb6ff", "#ffa05c", 40])


def test_a_narrow_screen_needs_no_horizontal_scrolling(page):
    page.set_viewport_size({"width": 360, "height": 700})
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size({"width": 1000, "height": 900})
    assert width <= 360
