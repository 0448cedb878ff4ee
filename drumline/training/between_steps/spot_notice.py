"""Spot notices: how a cloud or a cluster's own scripts announce that a machine will be reclaimed.

A probe is called repeatedly; it returns the text of the notice, or None.
"""

from __future__ import annotations

import http.client
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drumline.base.errors import log
from drumline.base.user_code import load_function

Probe = Callable[[], str | None]
TIMEOUT_S = 1.0
# AWS needs a token, which is fetched first.
METADATA_HOSTS = ("169.254.169.254", "fd00:ec2::254")
TOKEN_PATH = "/latest/api/token"
TOKEN_S = 21_600
_MOST_BYTES = 4096
_MOST_SHOWN = 160


@contextmanager
def watching_for_notice(notice: str, take_notice: Callable[[str], object]) -> Iterator[None]:
    """On one rank of each node: while the block runs, a thread polls for a notice
    (`--watch.notice`), and hands it to `take_notice`: the steps do not wait for it, and its errors
    do not end them. A user's function is loaded here, so that a missing one is an error at once."""
    probe, every_s = make_probe(notice)
    ended = threading.Event()

    def ask() -> None:
        has_warned = False
        while not ended.is_set():
            try:
                text = probe()
            except Exception as error:
                if not has_warned:
                    log.warning(
                        f"watch.notice {notice} failed: {type(error).__name__}: {error}; retrying every {every_s:g} s "
                        "without another warning"
                    )
                text = None
                has_warned = True
            if text and not ended.is_set():
                take_notice(text)
                return
            ended.wait(every_s)

    # A daemon thread that is not joined: the user's function may never return.
    threading.Thread(target=ask, name="drumline-notice", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def make_probe(notice: str) -> tuple[Probe, float]:
    """For a file, a web address, or `path/to/file.py:function`; and the seconds between two
    calls."""
    if notice.startswith(("http://", "https://")):
        return WebNotice(notice), 5.0
    if re.search(r"\.py:\w+$", notice):
        function = load_function(notice)
        return (
            lambda: f"{notice}: {_in_a_line(str(reason))}" if (reason := function()) else None,
            5.0,
        )
    # Often: checking for a file is cheap, and some scripts give only seconds.
    path = Path(notice)
    return lambda: f"a notice at {path}" if path.exists() else None, 1.0


class WebNotice:
    """The notice is a response with status 200 and a body that is not empty."""

    def __init__(self, url: str, *, token_url: str | None = None) -> None:
        """`token_url`: where to fetch a token, should one be needed."""
        parts = urllib.parse.urlsplit(url)
        if parts.hostname in METADATA_HOSTS:
            token_url = f"{parts.scheme}://{parts.netloc}{TOKEN_PATH}"
        self._url = url
        self._token_url = token_url
        self._token = ""
        # Without proxies and redirects: a response of a proxy or a login page is no notice.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def __call__(self) -> str | None:
        """A network error is no notice."""
        try:
            headers = {} if self._token_url is None else self._token_headers(self._token_url)
            body = self._request(self._url, "GET", headers)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.UNAUTHORIZED:
                    self._token = ""  # it has expired
            return None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        return f"a notice at {self._url}: {_in_a_line(body)}" if body.strip() else None

    def _token_headers(self, token_url: str) -> dict[str, str]:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = self._request(token_url, "PUT", lifetime).strip()
        return {"X-aws-ec2-metadata-token": self._token}

    def _request(self, url: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310 - http(s), by the rules
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(_MOST_BYTES) if answer.status == http.HTTPStatus.OK else b""
        return body.decode(errors="replace")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _in_a_line(text: str) -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."
