"""Where a notice of reclaim shows up: whoever lends a machine (a spot market, a cluster's own scripts) says so before
he takes it back.

A probe is asked again and again; it answers with the words of the notice, or None. Nothing is read or reached before a
run asks: that a setting is of a right form is a matter of `config/rules.py`.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.user_code import load_function

Probe = Callable[[], str | None]
TIMEOUT_S = 1.0
METADATA_HOSTS = ("169.254.169.254", "fd00:ec2::254")
"""Of AWS, which answers only those who fetch a token first."""
TOKEN_PATH, TOKEN_S = "/latest/api/token", 21_600
_MOST_BYTES, _MOST_SHOWN = 4096, 160


def make_probe(notice: str) -> tuple[Probe, float]:
    """For a file, a web address, or `path/to/file.py:function`; and how many seconds to leave between two looks."""
    if notice.startswith(("http://", "https://")):
        return WebNotice(notice), 5.0
    if re.search(r"\.py:\w+$", notice):
        return _asking(notice), 5.0
    # A short while: a file is looked at for next to nothing, and some who write one give only seconds.
    return _looking_for(Path(notice)), 1.0


def _looking_for(path: Path) -> Probe:
    return lambda: f"a notice at {path}" if path.exists() else None


def _asking(spec: str) -> Probe:
    function = load_function(spec)

    def ask() -> str | None:
        return f"{spec}: {_in_a_line(str(reason))}" if (reason := function()) else None

    return ask


class WebNotice:
    """Something at an address where there was nothing before: 200, and a body that is not empty."""

    def __init__(self, url: str, *, token_url: str | None = None) -> None:
        """`token_url`: where to fetch a token, should it take one."""
        parts = urllib.parse.urlsplit(url)
        if parts.hostname in METADATA_HOSTS:
            token_url = f"{parts.scheme}://{parts.netloc}{TOKEN_PATH}"
        self._url, self._token_url = url, token_url
        self._token, self._token_until = "", 0.0
        # Straight there: what a proxy or a login page says is no notice.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def __call__(self) -> str | None:
        """Whatever goes wrong on the way is no notice."""
        try:
            body = self._ask(self._url, "GET", self._headers())
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.UNAUTHORIZED:
                    self._token = ""  # it has expired
            return None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        return f"a notice at {self._url}: {_in_a_line(body)}" if body.strip() else None

    def _headers(self) -> dict[str, str]:
        if self._token_url is None:
            return {}
        if not self._token or time.monotonic() > self._token_until:
            wish = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = self._ask(self._token_url, "PUT", wish).strip()
            self._token_until = time.monotonic() + TOKEN_S / 2
        return {"X-aws-ec2-metadata-token": self._token}

    def _ask(self, url: str, method: str, headers: dict[str, str]) -> str:
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
