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


LINES = {
    "a long name": f"{PREFIX} WARN failed to extend /dev/shm{'x' * 3900}",
    "a file again and again": f"{PREFIX} WARN {'failed to extend /dev/shm' * 150}",
    "a card again and again": f"{PREFIX} WARN {'NET/IB : ' * 430}",
    "a communicator again and again": f"{PREFIX} INFO {'comm 0x1 rank 1 nranks 2 ' * 150}",
    "a prefix again and again": "NCCL " + "birch:1:1 [0] " * 280,
    "an error again and again": f"{PREFIX} WARN {'Cuda failure 1 ' * 250}",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_line_takes_no_longer_than_others_of_its_length(line: str) -> None:
    ordinary = f"{PREFIX} INFO Channel 00/02 : 0[0] -> 1[0] via P2P/CUMEM\n"
    hostile = f"{line}\n" * 3
    harmless = ordinary * (len(hostile) // len(ordinary))
    assert cpu_s(lambda: read_log(hostile)) < 15 * cpu_s(lambda: read_log(harmless))
