from __future__ import annotations

import random

import pytest

from drumline.training.between_steps import throughput as module
from drumline.training.between_steps.throughput import (
    NOT_MEASURED,
    DdpStepTimes,
    ModelFlops,
    Throughput,
    total_peak,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def test_pauses_do_not_count_and_a_lap_is_since_the_lap_before(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    for _ in range(4):
        throughput.count(10)
    clock.now += 2.0
    assert throughput.lap(waited_s=0.0).samples_per_s == 20.0
    throughput.stop()
    clock.now += 50.0
    throughput.start()
    throughput.count(10)
    clock.now += 1.0
    assert throughput.lap(waited_s=0.0).samples_per_s == 10.0
    assert throughput.steady().samples_per_s == pytest.approx(50 / 3)
    assert throughput.seconds_for(10) == pytest.approx(6.0)


def test_the_share_of_waiting_is_that_of_the_lap(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    throughput.count(1)
    clock.now += 2.0
    assert throughput.lap(waited_s=0.5).data_share == 0.25
    throughput.count(1)
    clock.now += 4.0
    assert throughput.lap(waited_s=1.5).data_share == 0.25
    throughput.count(1)
    clock.now += 1.0
    assert throughput.lap(waited_s=1.5).data_share == 0.0
    assert throughput.steady().data_share == pytest.approx(1.5 / 7)


def test_what_is_not_known_is_none(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    throughput.count(10)
    clock.now += 1.0
    speed = throughput.lap(waited_s=0.0)
    assert (speed.tokens_per_s, speed.tflop_per_s, speed.mfu, speed.communication_share) == (
        None,
        None,
        None,
        None,
    )
    throughput.model_flops = ModelFlops(
        total=10**12, num_samples=1, num_tokens=None, arithmetic="float32"
    )
    assert Throughput().steady().tflop_per_s is None, "no step was taken"
    speed = throughput.steady()
    assert (speed.tflop_per_s, speed.mfu) == (10.0, None)


def test_flops_and_mfu_follow_from_the_tokens(clock: Clock) -> None:
    throughput = Throughput()
    throughput.model_flops = ModelFlops(
        total=3 * 10**12, num_samples=2, num_tokens=6, arithmetic="bfloat16"
    )
    throughput.peak_tflop_per_s = 200.0
    throughput.start()
    for tokens, flops in ((100, 25.0), (300, 50.0)):
        throughput.count(1)
        clock.now += 2.0
        speed = throughput.lap(waited_s=0.0, tokens=tokens)
        assert (speed.tflop_per_s, speed.mfu) == (flops, flops / 200)
    whole = throughput.steady()
    assert (whole.tokens_per_s, whole.tflop_per_s, whole.mfu) == (75.0, 37.5, 0.1875)


def test_exposed_communication_is_a_share_of_the_time_in_which_it_was_measured(
    clock: Clock,
) -> None:
    throughput = Throughput()
    throughput.start()
    shares = []
    for measured in (NOT_MEASURED, DdpStepTimes(0.1, 0.5), DdpStepTimes(0.3, 0.5)):
        throughput.count(1)
        throughput.count(1)
        clock.now += 2.0
        shares.append(throughput.lap(waited_s=0.0, measured=measured).communication_share)
    assert shares == [None, pytest.approx(0.1), pytest.approx(0.3)]
    assert throughput.steady().communication_share == pytest.approx(0.2)


def test_a_measured_step_that_took_longer_than_the_others_has_its_own_share(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    for _ in range(10):
        throughput.count(1)
    clock.now += 2.0
    speed = throughput.lap(waited_s=0.5, measured=DdpStepTimes(exposed_s=9.0, computing_s=3.0))
    assert (speed.data_share, speed.communication_share) == (0.25, 0.75 * 0.75)


def test_the_parts_of_the_time_are_disjoint(clock: Clock) -> None:
    """Waiting for data and exposed communication, in every lap and over all: never more than the
    time."""
    numbers = random.Random(34)
    throughput = Throughput()
    throughput.start()
    waited_s = 0.0
    for lap in range(2000):
        for _ in range(numbers.randint(1, 10)):
            throughput.count(1)
        if lap == 0:
            throughput.end_start()
        lap_s = numbers.uniform(0.001, 3.0)
        waited_s += lap_s * numbers.choice([0.0, 1.0, numbers.random()])
        clock.now += lap_s
        measured = DdpStepTimes(
            numbers.choice([0.0, 1e-4, 0.5, 60.0]), numbers.choice([0.0, 1e-3, 1.0])
        )
        speed = throughput.lap(waited_s=waited_s, measured=numbers.choice([measured, NOT_MEASURED]))
        total = throughput.steady()
        for part in (speed, total):
            assert part.data_share >= 0
            assert (part.communication_share or 0.0) >= 0
            assert part.data_share + (part.communication_share or 0.0) <= 1.0


def test_the_steady_speed_has_no_first_step_and_nothing_that_was_compiled(clock: Clock) -> None:
    throughput = Throughput()
    throughput.model_flops = ModelFlops(
        total=10**12, num_samples=1, num_tokens=10, arithmetic="float32"
    )
    clock.now += 3.0
    throughput.start()
    throughput.count(10)
    clock.now += 97.0
    throughput.end_start(waited_s=90.0, tokens=100.0)
    assert throughput.start_s == 100.0
    throughput.count(10)
    clock.now += 1.0
    speed = throughput.lap(waited_s=90.5, tokens=200.0)
    assert speed.samples_per_s == 10.0
    assert throughput.seconds_for(7) == pytest.approx(7.0)
    throughput.count(10)
    clock.now += 50.0
    assert throughput.lap(
        waited_s=90.5, tokens=300.0, has_compiled=True
    ).samples_per_s == pytest.approx(0.2)
    throughput.count(10)
    clock.now += 1.0
    throughput.lap(waited_s=90.5, tokens=500.0)
    steady = throughput.steady()
    assert (steady.samples_per_s, steady.tokens_per_s, steady.tflop_per_s) == (10.0, 150.0, 15.0)
    assert steady.data_share == 0.25


def test_a_run_of_one_step_has_the_speed_of_that_step(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    throughput.count(10)
    clock.now += 4.0
    throughput.end_start()
    throughput.lap(waited_s=0.0)
    assert throughput.steady().samples_per_s == 2.5


def test_a_gpu_that_ranks_share_counts_once() -> None:
    def rank(host: str, gpu: str | None, device: str = "NVIDIA H200") -> dict[str, str | None]:
        return {"host": host, "gpu": gpu, "device": device}

    assert total_peak(
        [rank("a", "1"), rank("a", "1"), rank("b", "1")], "bfloat16"
    ) == pytest.approx(2 * 989.4)
    assert total_peak([rank("a", "1"), rank("a", "2", "NVIDIA A10")], "bfloat16") == pytest.approx(
        1114.4
    )
    assert total_peak([rank("a", "1"), rank("a", "2", "unheard of")], "bfloat16") is None
    assert total_peak([rank("a", None, "aarch64")], "float32") is None
