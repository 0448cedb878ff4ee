"""Logs that `drumline tune --log` reads, written to keep it busy: it takes no longer than for
others of their size."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from drumline.tools.tune.log_report import log_as_json, log_lines
from drumline.tools.tune.nccl_log import NcclLog
from tests.attacks.growth import cpu_s, growth

PREFIX = "birch:12:13 [0] NCCL"


def read_log(text: str) -> NcclLog:
    log = NcclLog()
    log.read(io.BytesIO(text.encode()), "log")
    list(log_lines(log))
    log_as_json(log)
    return log


PROCESSES: dict[str, Callable[[int], str]] = {
    "on one host": lambda number: f"birch:{number}:1",
    "on many hosts": lambda number: f"host-{number}:{number}:1",
    "with one pid": lambda number: f"host-{number}:1:1",
}


@pytest.mark.parametrize(
    "process_of",
    [
        pytest.param(process, id=name, marks=() if name == "on many hosts" else pytest.mark.soak)
        for name, process in PROCESSES.items()
    ],
)
def test_many_processes_take_linear_time(process_of: Callable[[int], str]) -> None:
    def read(count: int) -> NcclLog:
        lines = [
            f"{process_of(number)} [0] NCCL INFO comm 0x1 rank {number} nranks 9000000 - Init START"
            for number in range(count)
        ]
        return read_log("\n".join(lines))

    assert len(read(10).ranks) == 10
    assert growth(read, size=300, factor=8) < 32  # 8 if it is linear, 64 if quadratic


KINDS_OF_LINES: dict[str, Callable[[int], str]] = {
    "connections": lambda number: (
        f"{PREFIX} INFO Channel {number % 32:02d}/0 : {number % 97}[0] -> {number % 89}[1] via P2P/CUMEM"
    ),
    "different warnings": lambda number: (
        f"{PREFIX} WARN Connect to 10.0.{number // 250}.{number % 250}<{number}> failed : Connection refused"
    ),
    "unknown errors": lambda number: (
        f"ERROR {number:x} is not known {'abcdefgh'[number % 8] * (number % 50)}"
    ),
    "exceptions": lambda number: f"[rank{number}]: ValueError: {'xyz'[number % 3] * (number % 40)}",
    "timeouts": lambda number: (
        f"[rank{number}]: Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType=X, Timeout(ms)=1"
    ),
    "steps": lambda number: f"step {number} loss 0.1 lr 0.001 tokens/s 12345 memory 70 GB",
}


@pytest.mark.parametrize("line_of", KINDS_OF_LINES.values(), ids=KINDS_OF_LINES.keys())
def test_a_log_of_four_times_the_size_takes_about_four_times_as_long(
    line_of: Callable[[int], str],
) -> None:
    def read(count: int) -> NcclLog:
        return read_log("\n".join(map(line_of, range(count))))

    assert growth(read, size=1_000, factor=4) < 8  # 4 if it is linear, 16 if quadratic


LINES = {
    "a long name": f"{PREFIX} WARN failed to extend /dev/shm{'x' * 3900}",
    "a file again and again": f"{PREFIX} WARN {'failed to extend /dev/shm' * 150}",
    "a card again and again": f"{PREFIX} WARN {'NET/IB : ' * 430}",
    "a communicator again and again": f"{PREFIX} INFO {'comm 0x1 rank 1 nranks 2 ' * 150}",
    "a prefix again and again": "NCCL " + "birch:1:1 [0] " * 280,
    "an error again and again": f"{PREFIX} WARN {'Cuda failure 1 ' * 250}",
    "spaces": f"{PREFIX} WARN Error {' ' * 3900}",
    "a peer again and again": f"{PREFIX} WARN {'connect to 10.0.0.1<1> ' * 170}",
    "an exception again and again": "ValueError: " * 330 + "NCCL",
    "names with dots": "RuntimeError " + "a.b.c.d.e.f.g" * 300,
    "topology again and again": f"{PREFIX} WARN {'could not find ' * 260}",
    "driver again and again": f"{'driver version is ' * 220}",
    "addresses again and again": f"{'gloo 127.0.0.1 ' * 260}",
    "completions again and again": f"{PREFIX} WARN {'Got completion from peer ' * 150}",
    "watchdog again and again": f"{'Watchdog caught collective operation timeout: WorkNCCL(OpType=A ' * 60}",
    "groups again and again": f"{'PG ID 1 ' * 480} error",
    "provider again and again": f"{PREFIX} WARN {'NET/OFI Request ' * 240}",
    "peermem again and again": f"{'nvidia_peermem ' * 260}",
    "event again and again": f"{PREFIX} WARN {'mlx5_0:1 async event ' * 180}",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_line_takes_no_longer_than_others_of_its_length(line: str) -> None:
    ordinary = f"{PREFIX} INFO Channel 00/02 : 0[0] -> 1[0] via P2P/CUMEM\n"
    hostile = f"{line}\n" * 3
    harmless = ordinary * (len(hostile) // len(ordinary))
    assert cpu_s(lambda: read_log(hostile)) < 15 * cpu_s(lambda: read_log(harmless))
