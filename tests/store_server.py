"""A real S3 endpoint for tests: a moto server, and a proxy in front of it that delays, refuses and cuts connections."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

BUCKET = "bucket"
HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}
# What a proxy does with a request: None passes it on, a float waits so long first, an int is the status of the
# answer, "close" closes the connection without an answer and "cut" in the middle of it.
Fault = float | int | str | None


@contextmanager
def moto_server() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="pip install 'drumline[dev]' brings it").ThreadedMotoServer(
        "127.0.0.1", 0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Only this endpoint, and no credentials of the machine."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)


def environment(url: str) -> dict[str, str]:
    """The same for a process."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test-key-id",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@cache
def _client(server: str) -> Any:
    import boto3

    session = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test")
    return session.client("s3", endpoint_url=server, region_name="us-east-1")


def empty_bucket(server: str) -> Any:
    """A client of the server, which now has one bucket with nothing in it."""
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()
    _client(server).create_bucket(Bucket=BUCKET)
    return _client(server)


def objects(client: Any) -> dict[str, int]:
    """What the bucket holds."""
    return {one["Key"]: one["Size"] for one in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())}


class Proxy:
    """`fault(method, path)` says what to do with a request: see Fault."""

    def __init__(self, target: str, fault: Callable[[str, str], Fault] = lambda method, path: None) -> None:
        self.fault = fault
        self.requests: list[tuple[str, str]] = []
        self._is_closed = False
        self._target = urlsplit(target).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                proxy.handle(self)

            do_GET = do_HEAD = do_POST = do_DELETE = do_PUT

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        self.requests.append((request.command, path))
        request.close_connection = True
        fault = self.fault(request.command, path)
        if fault == "close":
            return
        if isinstance(fault, float):
            time.sleep(fault)
        if self._is_closed:  # what a later test finds must not come from here
            return
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if isinstance(fault, int):
            request.send_response(fault)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        self._forward(request, body, cuts=fault == "cut")

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes, *, cuts: bool) -> None:
        onward = http.client.HTTPConnection(self._target)
        onward.request(request.command, request.path, body, dict(request.headers))
        answer = onward.getresponse()
        content = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                request.send_header(name, value)
        request.send_header("Connection", "close")
        request.end_headers()
        with suppress(OSError):  # the client has given up
            request.wfile.write(content[: len(content) // 2] if cuts else content)
        onward.close()
