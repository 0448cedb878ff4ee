from __future__ import annotations

import pytest

from drumline.engine import throughput as module
from drumline.engine.model_flops import ModelFlops
from drumline.engine.throughput import Throughput, total_peak


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
    assert throughput.whole(waited_s=0.0).samples_per_s == pytest.approx(50 / 3)
    assert throughput.seconds_for(10) == pytest.approx(6.0)


def test_the_share_of_waiting_is_that_of_the_lap(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    clock.now += 2.0
    assert throughput.lap(waited_s=0.5).data_share == 0.25
    clock.now += 4.0
    assert throughput.lap(waited_s=1.5).data_share == 0.25
    clock.now += 1.0
    assert throughput.lap(waited_s=1.5).data_share == 0.0
    assert throughput.whole(waited_s=1.5).data_share == pytest.approx(1.5 / 7)


def test_what_is_not_known_is_none(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    throughput.count(10)
    clock.now += 1.0
    speed = throughput.lap(waited_s=0.0)
    assert (speed.tokens_per_s, speed.tflop_per_s, speed.mfu, speed.communication_share) == (None, None, None, None)
    throughput.model_flops = ModelFlops(total=10**12, num_samples=1, num_tokens=None, arithmetic="float32")
    assert Throughput().whole(waited_s=0.0).tflop_per_s is None, "no step was taken"
    speed = throughput.whole(waited_s=0.0)
    assert (speed.tflop_per_s, speed.mfu) == (10.0, None)


def test_flops_and_mfu_follow_from_the_tokens(clock: Clock) -> None:
    throughput = Throughput()
    throughput.model_flops = ModelFlops(total=3 * 10**12, num_samples=2, num_tokens=6, arithmetic="bfloat16")
    throughput.peak_tflop_per_s = 200.0
    throughput.start()
    for tokens, flops in ((100, 25.0), (300, 50.0)):
        throughput.count(1)
        clock.now += 2.0
        speed = throughput.lap(waited_s=0.0, tokens=tokens)
        assert (speed.tflop_per_s, speed.mfu) == (flops, flops / 200)
    whole = throughput.whole(waited_s=0.0)
    assert (whole.tokens_per_s, whole.tflop_per_s, whole.mfu) == (75.0, 37.5, 0.1875)


def test_exposed_communication_is_a_share_of_the_time_in_which_it_was_measured(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    shares = []
    for exposed_s in (None, 0.1, 9.0):
        throughput.count(1)
        throughput.count(1)
        clock.now += 2.0
        shares.append(throughput.lap(waited_s=0.0, exposed_s=exposed_s).communication_share)
    assert shares == [None, pytest.approx(0.1), 1.0]
    assert throughput.whole(waited_s=0.0).communication_share == pytest.approx(0.55)


def test_a_gpu_that_ranks_share_counts_once() -> None:
    def rank(host: str, gpu: str | None, device: str = "NVIDIA H200") -> dict[str, str | None]:
        return {"host": host, "gpu": gpu, "device": device}

    assert total_peak([rank("a", "1"), rank("a", "1"), rank("b", "1")], "bfloat16") == pytest.approx(2 * 989.4)
    assert total_peak([rank("a", "1"), rank("a", "2", "NVIDIA A10")], "bfloat16") == pytest.approx(1114.4)
    assert total_peak([rank("a", "1"), rank("a", "2", "unheard of")], "bfloat16") is None
    assert total_peak([rank("a", None, "aarch64")], "float32") is None
