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

from drumline.base.text import print_message

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


class LiveServer(ThreadingTCPServer):
    """Answers requests on threads of its own until it is closed, one for each connection. While
    there are MAX_CONNECTIONS, a new one replaces the oldest that has not asked for the page: other
    users of the machine could hold them all, without knowing the page's address."""

    daemon_threads = True

    def __init__(self, render: Callable[[], str]) -> None:
        """`render`: makes the page; one request at a time."""
        self.hidden_path = f"/{secrets.token_urlsafe(16)}/"
        self.served_at = 0.0
        """When the newest page that was sent began to be rendered, by the monotonic clock."""
        self._render = render
        self._rendering = threading.Lock()
        self._changing = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        """In the order of their arrival."""
        self._served: set[socket.socket] = set()
        super().__init__((LOOPBACK, 0), PageHandler)
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}{self.hidden_path}"
        self._thread = threading.Thread(
            target=self.serve_forever, name="drumline-live", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server and its threads."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def send_page(self, connection: socket.socket, send: Callable[[bytes], None]) -> None:
        """To a connection that has asked for it by its address."""
        with self._changing:
            self._idle.pop(connection, None)
            self._served.add(connection)

        with self._rendering:
            began = time.monotonic()
            content = self._render().encode(errors="backslashreplace")

        send(content)
        with self._rendering:
            self.served_at = max(self.served_at, began)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to answer a new connection; it may replace an idle one."""
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

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, then forget it."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changing:
                self._idle.pop(request, None)
                self._served.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong with one connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # that is a closed tab
            print_message(
                f"warning: the live report could not be served: {type(error).__name__}: {error}"
            )


class PageHandler(BaseHTTPRequestHandler):
    """Serves one page under one path; anything else is not found."""

    server: LiveServer
    timeout = REQUEST_S

    def do_GET(self) -> None:  # the name that http.server calls
        """The page, for its path and host alone."""
        port = self.server.server_address[1]
        # A page of another site that resolves to the loopback address has another host.
        is_own = self.headers.get("Host") in (f"{LOOPBACK}:{port}", f"localhost:{port}")
        requested_path = self.path.encode(errors="replace")
        if not is_own or not hmac.compare_digest(requested_path, self.server.hidden_path.encode()):
            self.send_error(404)
            return

        self.server.send_page(self.connection, self._send)

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
