"""Testbeds for tests, taken down after each; see hosts.py for how to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.multinode import needs
from tests.multinode.hosts import Testbed


@pytest.fixture
def make_testbed(tmp_path: Path) -> Iterator[Callable[..., Testbed]]:
    """`make_testbed("a", "b", shm="16m")`: hosts of these names. Skips where hosts cannot be made, and says why."""
    if (reason := needs.missing()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(*names: str, shm: str = "64m") -> Testbed:
            return stack.enter_context(Testbed(tmp_path / "testbed", names, shm=shm))

        yield make
