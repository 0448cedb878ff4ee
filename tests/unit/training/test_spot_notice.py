"""Notices of reclaim: a file, a real web server that answers as clouds do, and a function of the
user's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import UsageError
from drumline.training.between_steps import spot_notice
from drumline.training.between_steps.spot_notice import ask_web, make_probe
from tests.ranks import free_port

TOKEN = "AQAEA-token"


class Metadata(BaseHTTPRequestHandler):
    """What a machine's metadata address says; `server.says` is the answer to a GET."""

    server: Any

    def do_PUT(self) -> None:
        self.server.asked.append(
            ("PUT", self.path, self.headers["X-aws-ec2-metadata-token-ttl-seconds"])
        )
        self._answer(200 if self.server.gives_tokens else 403, TOKEN)

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path, self.headers["X-aws-ec2-metadata-token"]))
        if self.server.gives_tokens and self.headers["X-aws-ec2-metadata-token"] != TOKEN:
            self._answer(401, "Unauthorized")
        else:
            self._answer(*self.server.says)

    def _answer(self, code: int, body: str) -> None:
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def metadata(*, gives_tokens: bool = False) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.says = (404, "no")
    server.asked = []
    server.gives_tokens = gives_tokens
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_file(tmp_path: Path) -> None:
    probe, every_s = make_probe(str(tmp_path / "leave"))
    assert probe() is None
    assert every_s <= 1
    (tmp_path / "leave").touch()
    assert probe() == f"a notice at {tmp_path / 'leave'}"


def test_a_web_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # not asked: nobody is there
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with metadata() as server:
        probe, every_s = make_probe(f"{server.url}/notice?a=b")
        assert every_s == 5
        for nothing in [
            (404, "not found"),
            (200, ""),
            (200, " \n"),
            (302, "login"),
            (500, "oops"),
            (204, ""),
        ]:
            server.says = nothing
            assert probe() is None, nothing
        assert all(path == "/notice?a=b" for _, path, _ in server.asked)
        server.says = (
            200,
            '{"action": "terminate",\n "time": "2026-11-15T12:00:00Z"}\x1b[2J' + "x" * 9000,
        )
        words = probe()
        address = f"a notice at http://127.0.0.1:{server.server_port}/notice?a=b: "
        assert words is not None
        assert words.startswith(
            address + '{"action": "terminate", "time": "2026-11-15T12:00:00Z"} [2Jxx'
        )
        assert words.endswith("x...")
        assert len(words) < 300
    assert probe() is None  # refused, now that it is closed
    assert ask_web("http://127.0.0.1:99999/") is None


def test_a_slow_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_notice, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask_web(f"http://127.0.0.1:{silent.getsockname()[1]}/") is None


def test_a_token_is_fetched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "169.254.169.254" in spot_notice.METADATA_HOSTS
    monkeypatch.setattr(spot_notice, "METADATA_HOSTS", ("127.0.0.1",))
    with metadata(gives_tokens=True) as server:
        url = f"{server.url}/latest/meta-data/spot/instance-action"
        assert ask_web(url) is None
        assert server.asked == [
            ("PUT", "/latest/api/token", "60"),
            ("GET", "/latest/meta-data/spot/instance-action", TOKEN),
        ]
        server.says = (200, "terminate")
        assert ask_web(url) == f"a notice at {url}: terminate"
        server.gives_tokens = False  # and needs none
        assert ask_web(url) == f"a notice at {url}: terminate"


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reclaim_probe.py").write_text(
        "answers = iter([None, '', 'reclaimed\\nat noon'])\ndef ask(): return next(answers)\nclass No: pass\n"
    )
    spec = f"{tmp_path}/my_reclaim_probe.py:ask"
    probe, _ = make_probe(spec)
    assert [probe(), probe(), probe()] == [None, None, f"{spec}: reclaimed at noon"]
    with pytest.raises(UsageError) as raised:
        make_probe(f"{tmp_path}/my_reclaim_probe.py:asks")
    assert str(raised.value).endswith(
        "my_reclaim_probe.py has no function 'asks'; did you mean 'ask'?"
    )
