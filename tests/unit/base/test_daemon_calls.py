"""Calls in daemon threads."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from drumline.base.background import in_background, resolve_all


def test_whatever_ends_a_call_ends_the_wait() -> None:
    assert in_background(lambda: 3).result(60) == 3
    with pytest.raises(ValueError, match="invalid"):
        in_background(lambda: int("x")).result(60)
    with pytest.raises(SystemExit):
        in_background(sys.exit).result(60)


def test_names() -> None:
    resolved = resolve_all(["localhost", "10.1.2.3", "no-such-host.invalid"], limit_s=9.0)
    assert resolved["localhost"] == {"addresses": ["127.0.0.1"]}
    assert resolved["10.1.2.3"] == {"addresses": ["10.1.2.3"]}
    assert resolved["no-such-host.invalid"].keys() == {"error"}


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: held.wait(20) and [])
    assert resolve_all(["a"], limit_s=0.05) == {
        "a": {"error": "the resolver did not answer within 0.05 s"}
    }
    held.set()
