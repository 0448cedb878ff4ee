"""What a node's /metrics shows, and where it is served."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.config.rules import metrics_endpoint
from drumline.watch.heartbeat import Phase
from drumline.watch.sidecar import metrics_server
from drumline.watch.sidecar.prometheus_metrics import METRICS, PREFIX
from tests.metrics_node import LIMIT_S, ServedNode, ask, parsed, scrape, value, write_events
from tests.ranks import free_port


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "digits"


@pytest.fixture
def node(tmp_path: Path, run: Path) -> Iterator[ServedNode]:
    node = ServedNode(tmp_path / "watch", run=run)
    yield node
    node.close()


def test_heartbeats_are_read_when_they_are_scraped(node: ServedNode) -> None:
    node.heartbeats[1].begin_step(7)
    node.heartbeats[1].mark(Phase.DATA)
    node.observe()
    figures = parsed(scrape(node.port()))
    assert value(figures, "step", rank=1, host="node-a", run="digits") == 7
    assert value(figures, "step", rank=0) == 0
    assert value(figures, "rank_phase", rank=1) == 1
    assert value(figures, "rank_phase", rank=1, phase="data") == 1
    assert value(figures, "rank_up", rank=1) == 1
    assert value(figures, "heartbeat_age_seconds", rank=1) < LIMIT_S
    assert value(figures, "phase_seconds_total", rank=1, phase="start") > 0
    assert value(figures, "restarts_total") == 2, "the folder is that of the third start"


def test_the_run_folder_has_the_rest(node: ServedNode, run: Path) -> None:
    events = run / "events"
    newest = run / "checkpoints" / "step-00000040"
    for folder in (newest.with_name("step-00000020"), newest):
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    os.utime(newest / "manifest.json", (time.time() - 60,) * 2)
    train = {"kind": "train", "loss": 0.5, "samples_per_s": 8000, "tokens_per_s": None, "mfu": 0.4}
    write_events(events / "rank-00000.jsonl", {"kind": "mirrored", "newest": 20}, train)
    write_events(
        events / "watch.jsonl", {"kind": "hang", "cause": "stopped"}, {"kind": "straggler"}
    )

    figures = parsed(scrape(node.port()))
    assert value(figures, "loss") == 0.5
    assert value(figures, "samples_per_second") == 8000
    assert value(figures, "mfu_ratio") == 0.4
    assert (PREFIX + "tokens_per_second") not in {name for name, _ in figures}
    assert value(figures, "checkpoints") == 2
    assert value(figures, "checkpoint_step") == 40
    assert 60 <= value(figures, "checkpoint_age_seconds") < 60 + LIMIT_S
    assert value(figures, "mirror_backlog") == 1
    assert value(figures, "faults_total", alarm="hang", cause="stopped") == 1
    assert value(figures, "faults_total", alarm="stall", cause="dataset") == 0
    assert value(figures, "stragglers_total") == 1

    write_events(events / "rank-00000.jsonl", {**train, "loss": "nan"})
    time.sleep(0.25)
    assert math.isnan(value(parsed(scrape(node.port())), "loss"))


def test_storage_that_hangs_does_not_hold_the_answer_up(node: ServedNode, run: Path) -> None:
    events = run / "events" / "rank-00000.jsonl"
    events.parent.mkdir(parents=True)
    os.mkfifo(events)  # a reader waits for ever, as on a dead NFS server
    figures = parsed(scrape(node.port()))
    assert value(figures, "rank_up", rank=0) == 1


def test_every_sample_is_of_a_declared_metric(node: ServedNode) -> None:
    names = {name for name, _ in parsed(scrape(node.port()))}
    assert names <= {PREFIX + name for name in METRICS}
    assert {PREFIX + "step", PREFIX + "faults_total"} <= names


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /healthz HTTP/1.1", "200"), ("GET / HTTP/1.1", "404"), ("GET /metrics/.. HTTP/1.1", "404"),
        ("POST /metrics HTTP/1.1", "405"), ("\x00\xff", "405"),
    ],
)  # fmt: skip
def test_nothing_else_is_answered(node: ServedNode, request_line: str, status: str) -> None:
    request = f"{request_line}\r\nHost: localhost:9464\r\n\r\n".encode("latin-1")
    assert ask(node.port(), request).split()[1].decode() == status


def test_a_port_that_is_in_use_is_reported_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "TAKEN_S", 0.1)
    monkeypatch.setattr(metrics_server, "RETRY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        node = ServedNode(tmp_path, str(port))
        try:
            end = time.monotonic() + LIMIT_S
            while not node.lines and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.2)
            (line,) = node.lines
            assert "node-a" in line
            assert f"port {port}" in line
            other.close()
            time.sleep(0.2)
            assert value(parsed(scrape(port)), "rank_up", rank=0) == 1
        finally:
            node.close()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("9464", ("127.0.0.1", 9464)), ("0", ("127.0.0.1", 0)), ("10.0.0.5:9464", ("10.0.0.5", 9464)),
        ("[::1]:9464", ("::1", 9464)), ("node-a:9464", None), ("65536", None), ("0000009464", None),
        ("-1", None), ("", None), ("٣", None), ("127.0.0.1", None), ("127.0.0.1:", None),
    ],
)  # fmt: skip
def test_an_endpoint_is_a_port_or_an_address_with_one(
    text: str, endpoint: tuple[str, int] | None
) -> None:
    assert metrics_endpoint(text) == endpoint


@pytest.mark.parametrize("endpoint", ["192.0.2.1:9464", "[2001:db8::1]:9464"])
def test_an_address_of_another_host_is_reported_at_once(tmp_path: Path, endpoint: str) -> None:
    node = ServedNode(tmp_path, endpoint)
    try:
        end = time.monotonic() + LIMIT_S
        while not node.lines and time.monotonic() < end:
            time.sleep(0.01)
        assert endpoint.rpartition(":")[0].strip("[]") in node.lines[0]
        assert "port 9464" in node.lines[0]
    finally:
        node.close()


def test_ipv6_has_an_address_in_brackets(tmp_path: Path) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    port = free_port()
    node = ServedNode(tmp_path, "[::1]:0")
    try:
        node.port()
        assert node.lines[0].startswith("metrics of node-a: http://[::1]:")
        assert port
    finally:
        node.close()
