"""Debian's chromium, driven over a pipe by the DevTools protocol: one start for many pages and many
looks at each."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.multinode.needs import tool

PATIENCE_S = 60.0


class Browser:
    """One tab. What the page logs as an error, and every address that it asks for, is kept."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._unread = b""
        self._session = ""
        self.errors: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(
        self, page: Path | str, *, width: int = 1200, dark: bool = False, scripts: bool = True
    ) -> None:
        """Open a page, or the same one again, in a window of this width."""
        self.errors.clear()
        self.requested.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._note(self._next()) != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression; it is evaluated also where scripts of the page are off."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def drag(self, x: float, y: float, *, to: float) -> None:
        self._mouse("mousePressed", x, y)
        self._mouse("mouseMoved", to, y)
        self._mouse("mouseReleased", to, y)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        for count in range(1, times + 1):
            self._mouse("mousePressed", x, y, count)
            self._mouse("mouseReleased", x, y, count)

    def touch(self, *frames: Sequence[tuple[float, float]]) -> None:
        """Fingers that touch the page at these points, move to those of the further frames, and are
        lifted."""
        for number, frame in enumerate(frames):
            points = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(frame)]
            self.call(
                "Input.dispatchTouchEvent",
                type="touchMove" if number else "touchStart",
                touchPoints=points,
            )
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def _mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="left",
            buttons=1,
            clickCount=count,
        )

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._unread:
            assert time.monotonic() < deadline, "chromium does not answer"
            content = os.read(self._answers, 1 << 16)
            assert content, "chromium has exited"
            self._unread += content
        message, _, self._unread = self._unread.partition(b"\0")
        document: dict[str, Any] = json.loads(message)
        return document

    def _note(self, event: dict[str, Any]) -> str:
        method = event.get("method", "")
        params = event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown" or (
            method == "Log.entryAdded" and params["entry"]["level"] == "error"
        ):
            self.errors.append(json.dumps(params))
        return method


def _pipe_above_4() -> list[int]:
    """Else bash would replace one end by the other."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


@contextmanager
def chromium() -> Iterator[Browser]:
    """It talks on the descriptors 3 and 4, and ends when they are closed."""
    theirs, commands = _pipe_above_4()
    answers, ours = _pipe_above_4()
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        "--disable-extensions",
    ]
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        words = [
            tool("chromium"),
            *flags,
            "--disable-background-networking",
            f"--user-data-dir={folder}",
        ]
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{theirs} 4>&{ours} {theirs}<&- {ours}>&-',
                "bash",
                *words,
            ],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
