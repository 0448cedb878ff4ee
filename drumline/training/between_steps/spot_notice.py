"""A notice that this machine will be reclaimed (`--watch.notice`): a file that appears, a web
address that answers, as those of clouds do, or a function of the user's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from drumline.base.errors import log
from drumline.base.user_code import load_function

Probe = Callable[[], str | None]
TIMEOUT_S = 1.0
# AWS needs a token, which is fetched first.
METADATA_HOSTS = ("169.254.169.254", "fd00:ec2::254")
TOKEN_PATH = "/latest/api/token"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TOKEN_LIFETIME = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
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
        """Ask until there is a notice, or the block has ended."""
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
        return partial(ask_web, notice), 5.0

    if re.search(r"\.py:\w+$", notice):
        function = load_function(notice)

        def ask() -> str | None:
            """The answer of the user's function, as one line."""
            reason = function()
            return f"{notice}: {_in_a_line(str(reason))}" if reason else None

        return ask, 5.0

    # Often: checking for a file is cheap, and some scripts give only seconds.
    path = Path(notice)
    return lambda: f"a notice at {path}" if path.exists() else None, 1.0


def ask_web(url: str) -> str | None:
    """The notice is a response with status 200 and a body that is not empty."""
    headers = {}
    try:
        parts = urlsplit(url)
        if parts.hostname in METADATA_HOSTS:
            token_url = f"{parts.scheme}://{parts.netloc}{TOKEN_PATH}"
            headers = {TOKEN_HEADER: _request(token_url, "PUT", TOKEN_LIFETIME).strip()}
        body = _request(url, "GET", headers)
    except (OSError, HTTPException, ValueError):
        # a network error is no notice
        return None

    return f"a notice at {url}: {_in_a_line(body)}" if body.strip() else None


def _request(url: str, method: str, headers: dict[str, str]) -> str:
    """The body of the response; empty if its status is not 200. There are no proxies and no
    redirects: a response of a proxy or a login page is no notice."""
    parts = urlsplit(url)
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"

    with closing(connect(parts.netloc, timeout=TIMEOUT_S)) as connection:
        connection.request(method, target, headers=headers)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES) if response.status == HTTPStatus.OK else b""

    return body.decode(errors="replace")


def _in_a_line(text: str) -> str:
    """The text without line breaks and control characters, and not too long."""
    printable = (letter if letter.isprintable() else " " for letter in text)
    line = " ".join("".join(printable).split())
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."
