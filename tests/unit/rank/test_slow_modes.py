"""What slows each operation or each call of Python is seen, and off for some steps."""

from __future__ import annotations

import cProfile
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from drumline.rank.profiled.slow_modes import (
    ANOMALY,
    ANOMALY_CALLS,
    FOLLOWER,
    TRACER,
    SlowModes,
    python_tracers,
)

is_anomaly_really_enabled = ANOMALY_CALLS["is_anomaly_enabled"]


@pytest.fixture
def modes() -> Iterator[SlowModes]:
    modes = SlowModes()
    modes.observe()
    yield modes
    modes.resume()


def test_anomaly_detection_of_a_whole_run_is_off_for_some_steps() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        modes = SlowModes()
        modes.observe()
        modes.silence()
        assert not is_anomaly_really_enabled()
        modes.resume()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert list(modes.names) == [ANOMALY]
    for name, call in ANOMALY_CALLS.items():
        assert getattr(torch, name) is call


def test_anomaly_detection_inside_of_a_step_is_seen_too(modes: SlowModes) -> None:
    assert not modes.are_on()
    with torch.autograd.set_detect_anomaly(True):
        assert torch.is_anomaly_enabled()
    assert list(modes.names) == [ANOMALY]
    modes.silence()
    with torch.autograd.set_detect_anomaly(True):
        assert not is_anomaly_really_enabled()
    modes.resume()
    assert not torch.is_anomaly_enabled()


@pytest.fixture
def anomaly() -> Iterator[None]:
    """torch's mode is as before."""
    before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    yield
    torch.set_anomaly_enabled(*before)


@pytest.mark.parametrize("was_on", [False, True])
@pytest.mark.parametrize("is_on", [False, True])
def test_what_the_script_sets_in_silent_steps_is_kept(
    anomaly: None, was_on: bool, is_on: bool
) -> None:
    torch.set_anomaly_enabled(was_on)
    modes = SlowModes()
    modes.observe()
    modes.silence()
    torch.autograd.set_detect_anomaly(is_on, check_nan=False)
    modes.silence()
    assert not is_anomaly_really_enabled()
    modes.resume()
    assert torch.is_anomaly_enabled() == is_on
    assert not torch.is_anomaly_check_nan_enabled()


@pytest.mark.parametrize("was_on", [False, True])
@pytest.mark.parametrize("silent", ["at the beginning", "at the end", "in all of it"])
def test_a_block_with_anomaly_detection_restores_what_was_before(
    anomaly: None, was_on: bool, silent: str
) -> None:
    torch.set_anomaly_enabled(was_on)
    modes = SlowModes()
    modes.observe()
    if silent != "at the end":
        modes.silence()
    with torch.autograd.set_detect_anomaly(not was_on):
        if silent == "at the end":
            modes.silence()
        if silent == "at the beginning":
            modes.resume()
            assert torch.is_anomaly_enabled() != was_on
    modes.resume()
    assert torch.is_anomaly_enabled() == was_on


def test_a_debugger_is_off_for_some_steps(modes: SlowModes) -> None:
    seen: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: seen.append(event))
    tracer = sys.gettrace()
    try:
        modes.silence()
        seen.clear()
        assert sys.gettrace() is None
        "".join(["a"])
        assert not seen
        modes.resume()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert list(modes.names) == [TRACER]


def test_a_profiler_of_python_is_off_for_some_steps(modes: SlowModes) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("cProfile is no sys.setprofile there")
    with cProfile.Profile() as profile:
        assert modes.are_on()
        modes.silence()
        assert sys.getprofile() is None
        sorted([2, 1])
        modes.resume()
        assert sys.getprofile() is profile
        len([1])
    calls = {str(entry.code) for entry in profile.getstats()}
    assert any("len" in call for call in calls)
    assert not any("sorted" in call for call in calls)
    assert FOLLOWER in modes.names


def test_what_cannot_be_turned_off_is_named() -> None:
    assert "tracemalloc" not in python_tracers()
    tracemalloc.start()
    try:
        assert "tracemalloc" in python_tracers()
    finally:
        tracemalloc.stop()
