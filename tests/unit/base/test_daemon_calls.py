"""Calls in daemon threads."""

from __future__ import annotations

import sys

import pytest

from drumline.base.background import in_background


def test_whatever_ends_a_call_ends_the_wait() -> None:
    assert in_background(lambda: 3).result(60) == 3
    with pytest.raises(ValueError, match="invalid"):
        in_background(lambda: int("x")).result(60)
    with pytest.raises(SystemExit):
        in_background(sys.exit).result(60)
