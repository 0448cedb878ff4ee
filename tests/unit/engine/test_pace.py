from __future__ import annotations

import pytest

from drumline.engine import pace as pace_module
from drumline.engine.pace import Pace


def test_pauses_do_not_count_and_a_lap_is_since_the_lap_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now)
    pace = Pace()
    pace.start()
    for _ in range(4):
        pace.count(10)
    now += 2.0
    assert pace.lap() == 20.0
    pace.stop()
    now += 50.0
    pace.start()
    pace.count(10)
    now += 1.0
    assert pace.lap() == 10.0
    assert pace.samples_per_s == pytest.approx(50 / 3)
    assert pace.seconds_for(10) == pytest.approx(6.0)
    assert pace.seconds_since_start() == 53.0


def test_the_share_of_waiting_is_that_of_the_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now)
    pace = Pace()
    pace.start()
    now += 2.0
    pace.lap()
    assert pace.data_share(0.5) == 0.25
    now += 4.0
    pace.lap()
    assert pace.data_share(1.5) == 0.25
    now += 1.0
    pace.lap()
    assert pace.data_share(1.5) == 0.0
