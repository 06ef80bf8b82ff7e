"""The page in a real browser: what is there, what moves, and that nothing complains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.page import write_page
from tests.page.browser import Browser, installed
from tests.page.samples import make_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason="needs a Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed()
    assert program is not None
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(make_run(tmp_path_factory.mktemp("runs")))


CONTRAST = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll("h1, h1 span, p, td, th, a, figcaption, .quiet, tr.ours > *, text")]
    .map((e) => {
      const style = getComputedStyle(e), own = light(e.tagName === "text" ? style.fill : style.color);
      return [(Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05), e.outerHTML.slice(0, 60)];
    }).filter(([ratio]) => ratio < 4.5).map(([ratio, said]) => `${ratio.toFixed(2)} ${said}`);
})()"""


SQUEEZED = """[...document.querySelectorAll("table")]
  .filter((table) => getComputedStyle(table.parentElement).overflowX !== "auto"
    || table.caption?.getBoundingClientRect().width > innerWidth).map((table) => table.outerHTML.slice(0, 60))"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_parts_are_there_and_legible(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.open(page, width, theme)
    assert browser.complaints() == []
    assert browser.js("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    assert browser.js(SQUEEZED) == [], "tables scroll by themselves"
    for drawing in ("plane", "steps", "progress", "agreement-peak", "agreement-seconds"):
        assert browser.js(f"document.getElementById('{drawing}').getBoundingClientRect().height") > 100, drawing
    assert browser.js("document.querySelectorAll('#plan-strip .tile').length") == 2
    assert browser.js("document.querySelectorAll('#alive tbody tr').length") > 2
    assert browser.js(CONTRAST) == []
    dark = browser.js("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (theme == "dark")


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light")])
def test_the_budget_moves_by_keys_and_by_dragging(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.open(page, width, theme)
    said = "document.getElementById('known').innerText"
    assert "as asked" in browser.js(said) and "the answer of this run" in browser.js(said)
    browser.js("document.getElementById('budget-handle').focus()")
    browser.key("End")
    assert "#0 none" in browser.js(said)
    assert browser.js("document.querySelectorAll('#known-strip .tile.save').length") == 2
    browser.key("Home")
    assert "#0 none" not in browser.js(said)
    before = browser.js("document.getElementById('budget-handle').getAttribute('aria-valuetext')")
    browser.key("ArrowRight")
    assert browser.js("document.getElementById('budget-handle').getAttribute('aria-valuetext')") != before
    _drag_to_the_right(browser, "plane", "budget-handle")
    assert "#0 none" in browser.js(said)
    assert browser.complaints() == []


def test_the_moment_moves_and_tells_who_reads(browser: Browser, page: Path) -> None:
    browser.open(page, 390, "dark")
    said = "document.getElementById('moment-said').innerText"
    assert "the peak" in browser.js(said)
    browser.js("document.getElementById('moment-handle').focus()")
    browser.key("Home")
    first = browser.js(said)
    browser.key("ArrowRight")
    assert browser.js(said) != first and "forward" in first
    _drag_to_the_right(browser, "steps", "moment-handle")
    assert "optimizer" in browser.js(said)
    browser.js("document.querySelector('input[name=tape]').click()")
    assert browser.js(said).startswith("save everything")
    assert browser.complaints() == []


def test_it_is_printed_in_ink_on_paper_whatever_the_theme(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, "dark")
    browser.as_printed()
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.js(CONTRAST) == []
    assert browser.js("getComputedStyle(document.querySelector('.mark.phase0')).fill") == "rgb(27, 31, 36)"


def _drag_to_the_right(browser: Browser, drawing: str, handle: str) -> None:
    browser.js(f"document.getElementById('{drawing}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    place = "(() => {{ const b = document.querySelector('{}').getBoundingClientRect(); return [{}]; }})()"
    middle = "b.left + b.width / 2, b.top + b.height / 2"
    start = browser.js(place.format(f"#{handle} .grip", middle))
    end = browser.js(place.format(f"#{drawing}", "b.right - 1, b.top + b.height / 2"))
    browser.drag(tuple(start), tuple(end))
