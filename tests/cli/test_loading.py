"""What a command loads stays out of the garbage collector's sight."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from drumline.base.startup import loading


@pytest.fixture(autouse=True)
def nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_loaded_is_not_looked_at_again() -> None:
    with loading():
        assert not gc.isenabled()
        loaded = [object()]
    later = [object()]
    assert gc.isenabled()
    objects = gc.get_objects()
    assert not any(item is loaded for item in objects)
    assert any(item is later for item in objects)


def test_a_failure_does_not_leave_it_off() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
