"""What slows each operation or each call of Python is seen, and off for some steps."""

from __future__ import annotations

import cProfile
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from drumline.rank.watched.slow_modes import ANOMALY, SlowModes, python_tracers


@pytest.fixture
def modes() -> Iterator[SlowModes]:
    modes = SlowModes()
    modes.observe()
    yield modes
    modes.resume()


def test_anomaly_detection_of_a_whole_run_is_off_for_some_steps() -> None:
    set_mode = torch.set_anomaly_enabled
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        modes = SlowModes()
        modes.observe()
        modes.silence()
        assert not torch.is_anomaly_enabled()
        modes.resume()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert list(modes.names) == [ANOMALY]
    assert torch.set_anomaly_enabled is set_mode


def test_anomaly_detection_inside_of_a_step_is_seen_too(modes: SlowModes) -> None:
    assert not modes.are_on()
    with torch.autograd.set_detect_anomaly(True):
        assert torch.is_anomaly_enabled()
    assert list(modes.names) == [ANOMALY]
    modes.silence()
    with torch.autograd.set_detect_anomaly(True):
        assert not torch.is_anomaly_enabled()
    modes.resume()
    assert not torch.is_anomaly_enabled()


def test_a_debugger_is_off_for_some_steps(modes: SlowModes) -> None:
    seen: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: seen.append(event))
    tracer = sys.gettrace()
    try:
        assert modes.are_on()
        modes.silence()
        seen.clear()
        assert sys.gettrace() is None
        "".join(["a"])
        assert not seen
        modes.resume()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert list(modes.names) == ["sys.settrace, which follows each call of Python"]


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
    assert "sys.setprofile, as of cProfile, which follows each call of Python" in modes.names


def test_what_cannot_be_turned_off_is_named() -> None:
    assert "tracemalloc" not in python_tracers()
    tracemalloc.start()
    try:
        assert "tracemalloc" in python_tracers()
    finally:
        tracemalloc.stop()
