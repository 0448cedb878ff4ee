"""Commands that start with torch loaded, for tests that ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.warm import warm_python


@pytest.fixture
def warm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From here on, what the test starts with sys.executable has torch loaded."""
    with warm_python(tmp_path_factory.mktemp("warm") / "bin") as program:
        monkeypatch.setattr(sys, "executable", program)
        yield
