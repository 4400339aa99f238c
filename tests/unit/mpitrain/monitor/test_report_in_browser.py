"""The page of a report in a real Chromium, as `apt install chromium` brings it."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.monitoring.recorded_runs import Slow, write_run
from mpitrain.view.report.report_command import main

try:
    from playwright import sync_api as playwright
except ImportError:
    playwright = None
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

LOSS, RANKS = "[data-name=loss]", "[data-name=ranks]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if playwright is None or CHROMIUM is None:
        lacks = "there is no chromium" if playwright else "playwright is not installed"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lacks)
    with playwright.sync_playwright() as started:
        # root needs --no-sandbox
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(
        tmp_path_factory.mktemp("browser") / "run", steps=2500, ranks=4, slow=Slow(2, "cpu", 500, 900), skipped=[700], spikes=[1200],
        sources=["web", "a_source_of_code_with_a_long_name"], layers_every=100, save_every=500, evaluate_every=250, gpu=True,
        figures={"a": 1.0}, events=[{"event": "failure", "step": 1400, "problem": "rank 1 was killed"}],
    )  # fmt: skip
    assert main([str(folder)]) == 0
    return folder / "report.html"


class Opened:
    """A page, with what went wrong in it."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1280, theme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.wait_until(
            "/light|dark/.test(document.getElementById('theme').textContent)"
        )  # the last that the script writes

    def wait_until(self, condition: str) -> None:
        """As playwright's wait_for_function, which the page's security policy forbids."""
        for _ in range(200):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"not so within 5 s: {condition}; errors: {self.errors}")

    def pixels(self, of: str) -> np.ndarray:
        """(height, width, 3) of the first element, as it is shown."""
        from PIL import Image

        shot = self.page.locator(of).first.screenshot()
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))

    def brightness(self) -> float:
        """Of the background."""
        words = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return float(np.mean([int(number) for number in words.removeprefix("rgb(").removesuffix(")").split(",")]))

    def close(self) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith("file:")] == [] and len(self.requests) == 1
        self.page.close()

    def ends(self, of: str = LOSS) -> tuple[str, str]:
        """The step or time at the left and the right edge of a chart."""
        box = self.page.locator(f"{of} .u-over").first.bounding_box()
        return self.at(of, 0.0, box), self.at(of, 0.999, box)

    def at(self, of: str, share: float, box: dict[str, float]) -> str:
        self.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        return self.page.locator(f"{of} .head .push").first.inner_text()


def step(text: str) -> int:
    return int(text.removeprefix("step ").replace(",", ""))


@pytest.mark.rest
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_charts_are_drawn(browser: Any, page_of_run: Path, theme: str) -> None:
    opened = Opened(browser, page_of_run, theme=theme)
    page = opened.page
    assert page.evaluate("document.documentElement.classList.contains('dark')") == (theme == "dark")
    names = page.eval_on_selector_all(".chart", "cards => cards.map(card => card.dataset.name)")
    assert {"loss", "loss-by-source", "throughput", "step-split", "ranks", "memory-kinds", "layers", "figure-a"} <= set(
        names
    )
    # of what is drawn within the axes of each canvas: all pixels, those of the most frequent colour, and the number of colours
    drawn = page.evaluate(
        """[...document.querySelectorAll('.uplot')].map(plot => {
            const canvas = plot.querySelector('canvas'), over = plot.querySelector('.u-over'), r = devicePixelRatio;
            const box = [over.offsetLeft, over.offsetTop, over.clientWidth, over.clientHeight].map(v => r * v);
            const pixels = new Uint32Array(canvas.getContext('2d').getImageData(...box).data.buffer), counts = new Map();
            for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
            return [pixels.length, Math.max(...counts.values()), counts.size];
        })"""
    )
    assert len(drawn) >= len(names)
    assert all(total - most > 0.005 * total and num_colours > 5 for total, most, num_colours in drawn), drawn
    assert (opened.brightness() > 200) == (theme == "light")
    opened.close()


def test_the_slow_rank_stands_out_in_the_heat_map(browser: Any, page_of_run: Path) -> None:
    opened = Opened(browser, page_of_run)
    heat = opened.pixels(f"{RANKS} .uplot:last-child canvas >> nth=-1").astype(int)
    height = 4 * 18
    rows = [heat[4 + row * 18 + 5 : 4 + row * 18 + 13] for row in range(height // 18)]
    left, right = 54 + int(0.25 * (heat.shape[1] - 74)), 54 + int(0.32 * (heat.shape[1] - 74))
    darkness = [255 - np.median(row[:, left:right]) for row in rows]
    assert int(np.argmax(darkness)) == 2 and darkness[2] > 2 * sorted(darkness)[-2]
    opened.close()


def test_zoom_goes_with_all_charts(browser: Any, page_of_run: Path) -> None:
    opened = Opened(browser, page_of_run)
    page = opened.page
    over = page.locator(f"{LOSS} .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=3)
    page.mouse.up()
    first, last = map(step, opened.ends())
    assert abs(first - 500) < 15 and abs(last - 1500) < 15
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    for other in ("gradient-norm", "step-split", "memory"):
        assert abs(step(page.locator(f"[data-name={other}] .push").inner_text()) - 900) < 15
    # the failure at step 1,400 is a mark with words, and a finding that shows its steps
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 50)
    assert not page.locator("#tip").is_visible() or "killed" not in page.locator("#tip").inner_text()
    page.mouse.move(box["x"] + box["width"] * (1400 - first) / (last - first), box["y"] + 50)
    assert page.locator("#tip").inner_text() == "step 1,400: failure: rank 1 was killed"
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 50)
    assert step(opened.ends()[0]) <= 2 and step(opened.ends()[1]) > 2490
    page.locator(".findings li", has_text="Failure").locator("button").click()
    page.wait_for_timeout(500)  # the scrolling
    first, last = map(step, opened.ends())
    assert 1370 <= first < 1400 < last <= 1430
    opened.close()


def test_keys(browser: Any, page_of_run: Path) -> None:
    opened = Opened(browser, page_of_run)
    page = opened.page
    page.locator(LOSS).focus()
    page.locator(f"{LOSS} .u-over").scroll_into_view_if_needed()
    page.keyboard.press("+")
    first, last = map(step, opened.ends())
    assert abs(first - 625) < 15 and abs(last - 1875) < 15
    page.keyboard.press("ArrowRight")
    assert abs(step(opened.ends()[0]) - 875) < 20
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("-")
    assert step(opened.ends()[0]) <= 2
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert step(opened.ends()[1]) > 2490
    page.mouse.move(2, 2)
    page.keyboard.press("Shift+ArrowRight")
    place = page.locator(f"{LOSS} .head .push").first
    before = step(place.inner_text())
    page.keyboard.press("Shift+ArrowRight")
    assert step(place.inner_text()) > before
    page.keyboard.press("x")
    assert "min:s" in opened.ends()[1]
    page.keyboard.press("x")
    page.keyboard.press("s")
    assert page.locator("#smooth-words").inner_text() == "4 %" and page.locator("#smooth").input_value() == "8"
    page.keyboard.press("l")
    assert page.locator(f"{LOSS} button[title*=logarithmic]").get_attribute("aria-pressed") == "true"
    before = opened.brightness()
    page.keyboard.press("t")
    assert opened.brightness() < before - 100
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.locator(f"{RANKS} select").select_option(label="wait for data")
    page.locator(f"{RANKS} button", has_text="relative").click()
    assert page.locator(f"{RANKS} .uplot").count() == 2
    opened.close()


def test_a_narrow_window_needs_no_sideways_scroll(browser: Any, page_of_run: Path) -> None:
    opened = Opened(browser, page_of_run, width=400)
    page = opened.page
    page.locator("details").first.evaluate("details => { details.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.set_viewport_size({"width": 1000, "height": 900})
    opened.wait_until("document.querySelector('[data-name=loss] canvas').clientWidth > 600")
    page.set_viewport_size({"width": 400, "height": 900})
    opened.wait_until("document.querySelector('[data-name=loss] canvas').clientWidth < 400")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    opened.close()


@pytest.mark.rest
@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": 1, "ranks": 1},
        {"steps": 40, "skipped": range(1, 41), "torn": True},
        {"steps": 300, "ranks": 70},
    ],
)
def test_odd_runs(browser: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", **options)
    assert main([str(folder)]) == 0
    opened = Opened(browser, folder / "report.html")
    for key in ("x", "+", "s", "0", "t"):
        opened.page.keyboard.press(key)
    opened.close()


@pytest.mark.rest
def test_several_runs(browser: Any, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, steps=steps, seed=steps) for name, steps in (("long", 3000), ("short", 500))]
    assert main([*map(str, folders), "--out", str(tmp_path / "both.html")]) == 0
    opened = Opened(browser, tmp_path / "both.html")
    page = opened.page
    legend = page.locator(f"{LOSS} .legend button")
    assert [text.split()[0] for text in legend.all_inner_texts()] == ["long", "short"]
    assert page.locator(RANKS).count() == 2 and page.locator(f"{RANKS}:visible").count() == 1
    page.locator("#run").select_option(label="short")
    assert page.locator(f"{RANKS}:visible").get_attribute("data-run") == "1"
    legend.nth(0).click()
    assert legend.nth(0).get_attribute("aria-pressed") == "false"
    opened.close()
