"""Serves the page of a run on the loopback address while the run is training, rendered for each
request.

Other users of the machine can connect to it: the path has a random token, and only the page is
served.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from drumline.base.terminal import print_message

LOOPBACK = "127.0.0.1"
REQUEST_S = 10.0
MAX_CONNECTIONS = 16
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class _DaemonServer(ThreadingTCPServer):
    """A thread for each connection. While there are MAX_CONNECTIONS, a new one replaces the oldest
    that has not asked for the page: other users of the machine could hold them all, without knowing
    the page's address."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._changing = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        """In the order of their arrival."""
        self._served: set[socket.socket] = set()
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changing:
            if len(self._idle) + len(self._served) >= MAX_CONNECTIONS:
                oldest = next(iter(self._idle), None)
                if oldest is None:
                    return False
                del self._idle[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._idle[request] = None
        return True

    def begin_serving(self, connection: socket.socket) -> None:
        """This connection has asked for the page by its address."""
        with self._changing:
            self._idle.pop(connection, None)
            self._served.add(connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changing:
                self._idle.pop(request, None)
                self._served.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # that is a closed tab
            print_message(
                f"warning: the live report could not be served: {type(error).__name__}: {error}"
            )


class LiveServer:
    """Answers requests on a thread of its own until it is closed."""

    def __init__(self, render: Callable[[], str]) -> None:
        """`render`: makes the page; one request at a time."""
        path = f"/{secrets.token_urlsafe(16)}/"
        self.served_at = 0.0
        """When the newest page that was sent began to be rendered, by the monotonic clock."""
        lock = threading.Lock()

        def send_page(send: Callable[[bytes], None]) -> None:
            with lock:
                began = time.monotonic()
                content = render().encode(errors="backslashreplace")
            send(content)
            with lock:
                self.served_at = max(self.served_at, began)

        class Handler(PageHandler):
            hidden_path = path
            send_page_with = staticmethod(send_page)

        self._server = _DaemonServer((LOOPBACK, 0), Handler)
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}{path}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="drumline-live", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Serves one page under one path; anything else is not found."""

    hidden_path = ""
    send_page_with: Callable[[Callable[[bytes], None]], None]
    """Renders the page and calls its argument with it."""
    timeout = REQUEST_S

    def do_GET(self) -> None:  # the name that http.server calls
        port = self.server.server_address[1]  # type: ignore[index]
        # A page of another site that resolves to the loopback address has another host.
        is_own = self.headers.get("Host") in (f"{LOOPBACK}:{port}", f"localhost:{port}")
        if not is_own or not hmac.compare_digest(
            self.path.encode(errors="replace"), self.hidden_path.encode()
        ):
            self.send_error(404)
            return
        if isinstance(self.server, _DaemonServer):
            self.server.begin_serving(self.connection)
        self.send_page_with(self._send)

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "drumline"

    def log_message(self, format: str, *args: Any) -> None:
        pass
