"""The report in a real browser: curves that are drawn and zoomed, a phone, dark mode, no JavaScript, a hostile run. One
start of chromium for all.

`python -m tests.cli.test_report_browser RUN ... FOLDER` takes screenshots of real runs, to look at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.report.live_server import LiveServer
from drumline.report.page import render_page, write_report
from drumline.report.run_data import read_run
from tests.browser import Browser, chromium
from tests.multinode.needs import missing_browser
from tests.report_runs import write_run

PHONE = 390
EVIL = "</script><script>window.pwned=1</script><img src=http://127.0.0.1:9/x onerror='window.pwned=1'>"
CANVAS = "document.querySelector('canvas').toDataURL()"
BOX = "(({x, y, width}) => [x, y, width])(document.querySelector('.u-over').getBoundingClientRect())"
COLOURS = """[...document.querySelectorAll('.heat tr')].map((row) =>
    [...row.querySelectorAll('td[class]')].map((cell) => getComputedStyle(cell).backgroundColor))"""


@pytest.fixture(name="browser", scope="module")
def make_browser() -> Iterator[Browser]:
    if reason := missing_browser():
        pytest.skip(reason)
    with chromium() as browser:
        yield browser


@pytest.fixture(name="page", scope="module")
def make_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "run", slow_rank=2, fault_at=120)
    return write_report([run], folder / "page.html")


def test_curves_are_drawn_and_zoomed_and_nothing_is_fetched(browser: Browser, page: Path) -> None:
    browser.open(page)
    charts = browser.value("document.querySelectorAll('.chart').length")
    assert browser.value("document.querySelectorAll('.chart canvas').length") == charts > 3
    whole = browser.value(CANVAS)
    x, y, width = browser.value(BOX)
    browser.drag(x + width / 4, y + 20, to=x + width / 2)
    zoomed = browser.value(CANVAS)
    assert zoomed != whole
    browser.click(x + width / 2, y + 20, times=2)
    assert browser.value(CANVAS) == whole
    assert browser.requested == [page.resolve().as_uri()]
    assert browser.errors == [], "the policy of the page forbids nothing that it does"


def test_fingers_select_and_stretch_steps_and_a_button_resets(browser: Browser, page: Path) -> None:
    browser.open(page, width=PHONE)
    browser.value("document.querySelector('.chart').scrollIntoView({block: 'center'})")
    x, y, width = browser.value(BOX)
    whole, button = browser.value(CANVAS), "document.querySelector('.reset')"
    assert browser.value(f"{button}.hidden")
    browser.touch([(x + width / 4, y + 40)], [(x + width / 2, y + 40)])
    selected = browser.value(CANVAS)
    assert selected != whole
    tap = browser.value(f"(({{x, y}}) => [x + 5, y + 5])({button}.getBoundingClientRect())")
    browser.click(*tap)
    assert browser.value(f"{button}.hidden")
    assert browser.value(CANVAS) == whole
    middle = x + width / 2
    browser.touch([(middle - 20, y + 40), (middle + 20, y + 40)], [(middle - 60, y + 40), (middle + 60, y + 40)])
    assert browser.value(CANVAS) not in (whole, selected)
    browser.click(*tap)
    assert browser.value(f"{button}.hidden")
    assert browser.value(CANVAS) == whole
    browser.touch([(middle, y + 40)], [(middle + 8, y + 40)])
    assert browser.value(CANVAS) == whole, "a tap is no selection"
    assert browser.errors == []


def test_it_fits_a_phone_and_has_one_column(browser: Browser, page: Path) -> None:
    browser.open(page, width=PHONE)
    assert browser.value("document.documentElement.scrollWidth") == PHONE
    lefts = browser.value("[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().left)")
    assert len(set(lefts)) == 1
    widths = browser.value("[...document.querySelectorAll('canvas')].map((one) => one.getBoundingClientRect().width)")
    assert 250 < min(widths) <= max(widths) < PHONE
    browser.open(page)
    lefts = browser.value("[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().left)")
    assert len(set(lefts)) == 2, "there is room for two beside each other"


def test_it_is_dark_where_the_reader_wants_that(browser: Browser, page: Path) -> None:
    colours = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]


def test_without_scripts_it_has_tables_and_the_slow_rank(browser: Browser, page: Path) -> None:
    browser.open(page, scripts=False)
    assert browser.value("document.querySelectorAll('canvas').length") == 0
    assert browser.value("getComputedStyle(document.querySelector('.script')).display") == "none"
    tables = browser.value("[...document.querySelectorAll('figure table')].map((one) => one.rows.length)")
    assert tables == [13] * len(tables)
    assert tables
    rows = browser.value(COLOURS)
    assert [len(set(row)) > 1 for row in rows] == [False, False, True, False], "only rank 2 changes its colour"
    assert rows[2][-1] != rows[1][-1] == rows[0][-1]


def test_a_hostile_run_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", task=EVIL, metric=EVIL, message=EVIL, slow_rank=1, settings={"lr": EVIL})
    page = write_report([run, run], tmp_path / "page.html")
    browser.open(page)
    assert browser.value("window.pwned") is None
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.querySelectorAll('.chart canvas').length") > 3
    assert EVIL in browser.value("document.body.innerText")
    assert browser.requested == [page.resolve().as_uri()]
    # Were there a hole, the policy would hold.
    browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x>')")
    browser.value("document.body.append(Object.assign(document.createElement('script'), {text: 'window.pwned = 1'}))")
    assert browser.value("window.pwned") is None


def test_a_live_page_is_drawn(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    server = LiveServer(lambda: render_page([read_run(run)], refresh_s=5.0))
    try:
        browser.open(server.url)
        assert browser.value("document.querySelectorAll('.chart canvas').length") > 3
        assert browser.errors == []
        browser.open("about:blank")
    finally:
        server.close()


def take_screenshots(runs: list[Path], folder: Path) -> None:
    page = write_report(runs, folder / "page.html")
    with chromium() as browser:
        for name, width, dark in (("desktop", 1200, False), ("phone", PHONE, False), ("dark", 1200, True)):
            browser.open(page, width=width, dark=dark)
            browser.screenshot(folder / f"{name}.png")


if __name__ == "__main__":
    take_screenshots([Path(name) for name in sys.argv[1:-1]], Path(sys.argv[-1]))
