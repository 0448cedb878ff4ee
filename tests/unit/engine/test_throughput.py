from __future__ import annotations

import pytest

from drumline.engine import run_context
from drumline.engine.run_context import Throughput


def test_pauses_do_not_count_and_a_lap_is_since_the_lap_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_context.time, "perf_counter", lambda: now)
    throughput = Throughput()
    throughput.start()
    for _ in range(4):
        throughput.count(10)
    now += 2.0
    assert throughput.lap(0.0) == (20.0, 0.0)
    throughput.stop()
    now += 50.0
    throughput.start()
    throughput.count(10)
    now += 1.0
    assert throughput.lap(0.0) == (10.0, 0.0)
    assert throughput.samples_per_s == pytest.approx(50 / 3)
    assert throughput.seconds_for(10) == pytest.approx(6.0)
    assert throughput.seconds_since_start() == 53.0


def test_the_share_of_waiting_is_that_of_the_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_context.time, "perf_counter", lambda: now)
    throughput = Throughput()
    throughput.start()
    now += 2.0
    assert throughput.lap(0.5)[1] == 0.25
    now += 4.0
    assert throughput.lap(1.5)[1] == 0.25
    now += 1.0
    assert throughput.lap(1.5)[1] == 0.0
