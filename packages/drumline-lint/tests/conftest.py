"""For all tests of the linter."""

from __future__ import annotations

from pathlib import Path

import pytest

# They only look like tests.
collect_ignore = ["snippets"]


@pytest.fixture(autouse=True)
def keep_no_results(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept in the home of whoever runs the tests, nor from one test to the next."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
