"""The report in a real browser: curves that are drawn and zoomed, a phone, dark mode, no
JavaScript, a hostile run. One start of chromium for all.

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
from tests.report_runs import METRICS, SETS, write_run, write_run_of_many_metrics

PHONE = 390
WIDTH = 1200
EVIL = "</script><script>window.pwned=1</script><img src=http://127.0.0.1:9/x onerror='window.pwned=1'>"
CANVAS = "document.querySelector('canvas').toDataURL()"
BOX = (
    "(({x, y, width}) => [x, y, width])(document.querySelector('.u-over').getBoundingClientRect())"
)
LEGENDS = """Object.fromEntries([...document.querySelectorAll('figure')].map((figure) => [
    figure.querySelector('figcaption').firstChild.textContent,
    Object.fromEntries([...figure.querySelectorAll('.u-series')].slice(1).map((row) => [
        row.querySelector('.u-label').textContent, row.querySelector('.u-marker').style.borderColor]))]))"""
CLIPPED_LEGENDS = """[...document.querySelectorAll('.u-legend')].filter((legend) =>
    legend.scrollHeight > legend.clientHeight + 1 || legend.scrollWidth > legend.clientWidth + 1).length"""
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
    whole = browser.value(CANVAS)
    button = "document.querySelector('.reset')"
    assert browser.value(f"{button}.hidden")
    browser.touch([(x + width / 4, y + 40)], [(x + width / 2, y + 40)])
    selected = browser.value(CANVAS)
    assert selected != whole
    tap = browser.value(f"(({{x, y}}) => [x + 5, y + 5])({button}.getBoundingClientRect())")
    browser.click(*tap)
    assert browser.value(f"{button}.hidden")
    assert browser.value(CANVAS) == whole
    middle = x + width / 2
    browser.touch(
        [(middle - 20, y + 40), (middle + 20, y + 40)],
        [(middle - 60, y + 40), (middle + 60, y + 40)],
    )
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
    lefts = browser.value(
        "[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().left)"
    )
    assert len(set(lefts)) == 1
    widths = browser.value(
        "[...document.querySelectorAll('canvas')].map((one) => one.getBoundingClientRect().width)"
    )
    assert 250 < min(widths) <= max(widths) < PHONE
    browser.open(page)
    lefts = browser.value(
        "[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().left)"
    )
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
    tables = browser.value(
        "[...document.querySelectorAll('figure table')].map((one) => one.rows.length)"
    )
    assert tables == [13] * len(tables)
    assert tables
    rows = browser.value(COLOURS)
    assert [len(set(row)) > 1 for row in rows] == [False, False, True, False], (
        "only rank 2 changes its colour"
    )
    assert rows[2][-1] != rows[1][-1] == rows[0][-1]


def colours_by_chart(browser: Browser) -> dict[str, dict[str, str]]:
    """By the title of the chart: the colour of each name in its legend. The first row of a legend
    is the step."""
    value: dict[str, dict[str, str]] = browser.value(LEGENDS)
    return value


def test_the_sets_of_a_run_have_the_same_colours_in_every_chart(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run_of_many_metrics(tmp_path / "run")
    browser.open(write_report([run], tmp_path / "page.html"))
    charts = colours_by_chart(browser)
    colours = charts["loss"]
    assert list(colours) == ["training", *(f"evaluation {name}" for name in SETS)]
    assert len(set(colours.values())) == 4
    assert all(charts[metric] == colours for metric in METRICS)
    assert browser.value(CLIPPED_LEGENDS) == 0
    assert browser.value("document.documentElement.scrollWidth") <= WIDTH
    assert browser.errors == []


def test_twelve_metrics_of_three_sets_and_six_runs_can_be_told_apart(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [
        write_run_of_many_metrics(tmp_path / f"digits-with-warm-up-{number}", scale=1 + number)
        for number in range(6)
    ]
    page = write_report(runs, tmp_path / "page.html")
    for width in (WIDTH, PHONE):
        browser.open(page, width=width)
        charts = colours_by_chart(browser)
        colours = charts["loss: training"]
        assert list(colours) == [run.name for run in runs]
        assert len(set(colours.values())) == 6
        kinds = ["training", *(f"evaluation {name}" for name in SETS)]
        assert all(charts[f"{metric}: {kind}"] == colours for metric in METRICS for kind in kinds)
        assert browser.value(CLIPPED_LEGENDS) == 0
        assert browser.value("document.documentElement.scrollWidth") <= width
    text = browser.value("document.body.innerText")
    assert all(f"{name}/{metric}" in text for metric in METRICS for name in SETS)
    assert browser.errors == []


def test_a_hostile_run_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", task=EVIL, metric=EVIL, message=EVIL, slow_rank=1, settings={"lr": EVIL}
    )
    page = write_report([run, run], tmp_path / "page.html")
    browser.open(page)
    assert browser.value("window.pwned") is None
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.querySelectorAll('.chart canvas').length") > 3
    assert EVIL in browser.value("document.body.innerText")
    assert browser.requested == [page.resolve().as_uri()]
    # Were there a hole, the policy would hold.
    browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x>')")
    browser.value(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.pwned = 1'}))"
    )
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
        for name, width, dark in (
            ("desktop", 1200, False),
            ("phone", PHONE, False),
            ("dark", 1200, True),
        ):
            browser.open(page, width=width, dark=dark)
            browser.screenshot(folder / f"{name}.png")


if __name__ == "__main__":
    take_screenshots([Path(name) for name in sys.argv[1:-1]], Path(sys.argv[-1]))
