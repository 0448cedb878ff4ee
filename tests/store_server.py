"""A real S3 endpoint for tests: a moto server with a bucket for each test (fixtures `aws_server`,
`bucket`), and a proxy in front of it that delays, refuses and cuts connections."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest

NUMBERS = count(1)
HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}
# What a proxy does with a request: None passes it on, a float waits so long first, an int is the
# status of the answer, "close" closes the connection without an answer and "cut" in the middle of
# it.
Fault = float | int | str | None


@contextmanager
def moto_server() -> Iterator[str]:
    server = pytest.importorskip(
        "moto.server", reason="pip install 'drumline[dev]' brings it"
    ).ThreadedMotoServer("127.0.0.1", 0, verbose=False)
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
def client_of(server: str) -> Any:
    """One for all tests: it takes 0.1 s to make."""
    import boto3

    session = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test")
    return session.client("s3", endpoint_url=server, region_name="us-east-1")


@cache
def shared_loader(*path: Any) -> Any:
    """Of botocore's large files: to read them again takes most of the time that it takes to make a
    client."""
    from botocore.loaders import create_loader

    return create_loader(*path)


@dataclass(frozen=True)
class Bucket:
    """Of one test: what a thread of an earlier test still sends does not reach it."""

    server: str
    name: str

    @property
    def root(self) -> str:
        return f"s3://{self.name}"

    @property
    def url(self) -> str:
        """A prefix in it, for a run."""
        return f"{self.root}/runs/a"

    @property
    def client(self) -> Any:
        return client_of(self.server)

    def put(self, key: str, content: bytes = b"") -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def begin_upload(self, key: str) -> None:
        """As a process does that is killed before its second part."""
        self.client.create_multipart_upload(Bucket=self.name, Key=key)

    def unfinished(self) -> list[str]:
        listing = self.client.list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in listing.get("Uploads", ())]

    def sizes(self) -> dict[str, int]:
        listing = self.client.list_objects_v2(Bucket=self.name)
        return {entry["Key"]: entry["Size"] for entry in listing.get("Contents", ())}


@contextmanager
def new_bucket(server: str) -> Iterator[Bucket]:
    bucket = Bucket(server, f"bucket-{next(NUMBERS)}")
    bucket.client.create_bucket(Bucket=bucket.name)
    yield bucket
    forget_all(server)  # objects may be large


def forget_all(server: str) -> None:
    """moto deletes everything of every service."""
    urllib.request.urlopen(
        urllib.request.Request(f"{server}/moto-api/reset", method="POST")
    ).close()


class Proxy:
    """`fault(method, path)` says what to do with a request: see Fault."""

    def __init__(
        self, target: str, fault: Callable[[str, str], Fault] = lambda method, path: None
    ) -> None:
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
            request.send_header("Connection", "close")
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
