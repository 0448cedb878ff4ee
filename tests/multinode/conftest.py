"""Testbeds for tests, taken down after each; see hosts.py for how to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.multinode import needs
from tests.multinode.hosts import Testbed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where hosts cannot be made; as a mark, so that all of them together are one line of the
    summary."""
    mine = [item for item in items if "make_testbed" in getattr(item, "fixturenames", ())]
    if mine and (reason := needs.missing()) is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def make_testbed(tmp_path: Path) -> Iterator[Callable[..., Testbed]]:
    """`make_testbed("a", "b", shm="16m")`: hosts of these names, once per test."""
    with ExitStack() as stack:

        def make(*names: str, shm: str = "64m", warm: bool = False) -> Testbed:
            return stack.enter_context(Testbed(tmp_path / "testbed", names, shm=shm, warm=warm))

        yield make
