"""The writer's thread: a job that succeeds, fails, or is waited for."""

from __future__ import annotations

import threading

import pytest

from drumline.checkpoint.copying import Writer


def test_a_result_waits_until_it_is_taken() -> None:
    writer: Writer[int] = Writer()
    assert (writer.has_news, writer.is_busy, writer.take()) == (False, False, None)
    gate = threading.Event()
    writer.start(lambda: 5 if gate.wait() else 0)
    assert writer.is_busy
    assert not writer.has_news
    assert not writer.wait(0.01)
    gate.set()
    assert writer.wait()
    assert writer.has_news
    assert writer.take() == 5
    assert (writer.has_news, writer.take()) == (False, None)


def test_an_error_is_raised_once_where_it_is_taken() -> None:
    writer: Writer[None] = Writer()

    def fail() -> None:
        raise OSError("no disk")

    writer.start(fail)
    writer.wait()
    assert writer.has_news
    with pytest.raises(OSError, match="no disk"):
        writer.take()
    assert not writer.has_news
    writer.start(lambda: None)
    assert writer.take() is None
