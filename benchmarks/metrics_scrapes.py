"""What /metrics costs a step: one run, scraped twice a second in every other interval, and not in those
between.

    make bench-watch        (or: python -m benchmarks.metrics_scrapes --intervals 40)

Compared are the ranks' processor time for each step, and the sidecar's share of a core. The steps a
second are printed too: on a machine that others use they vary much more than a scrape costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PORT = 19464
INTERVAL_S = 2.0
SCRAPE_S = 0.5
COMMAND = (
    "-m drumline train digits --procs 2 --run run --model.widths 16 --train.steps 1000000 --train.batch_size 64 "
    f"--log.every_steps 2 --log.display none --checkpoint.every_epochs 0 --log.prometheus {PORT}"
)
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def scrape() -> bytes:
    with OPENER.open(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
        return bytes(answer.read())


def step_times(events: Path) -> list[tuple[float, int]]:
    """When the run had done how many steps, by its log lines."""
    lines = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
    return [(line["time"], line["step"]) for line in lines if line["kind"] == "train"]


def processor_s(pids: Sequence[int]) -> float:
    """What these processes have used, with all their threads."""
    ticks = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def sidecar_of(rank: int) -> int:
    """The process, which the first rank of a node has started."""
    children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    threads = Path(f"/proc/{rank}/task").iterdir()
    children += [pid for thread in threads for pid in (thread / "children").read_text().split()]
    return next(
        int(pid) for pid in children if "sidecar" in Path(f"/proc/{pid}/cmdline").read_text()
    )


@dataclass(frozen=True)
class Interval:
    steps_per_s: float
    ranks_s: float
    """Processor time of the ranks for each step."""
    sidecar_share: float
    """Of a core."""


@dataclass(frozen=True)
class Moment:
    time: float
    ranks_s: float
    sidecar_s: float


def interval(times: list[tuple[float, int]], begin: Moment, end: Moment) -> Interval:
    inside = [(moment, step) for moment, step in times if begin.time <= moment <= end.time]
    (first, before), (last, after) = inside[0], inside[-1]
    rate = (after - before) / (last - first)
    seconds = end.time - begin.time
    return Interval(
        rate,
        (end.ranks_s - begin.ranks_s) / (rate * seconds),
        (end.sidecar_s - begin.sidecar_s) / seconds,
    )


def measure(num_intervals: int, folder: Path) -> list[Interval]:
    """Without scrapes and with them, in turn."""
    with (folder / "out.txt").open("w") as out:
        job = subprocess.Popen(
            [sys.executable, *COMMAND.split()], cwd=folder, stdout=out, stderr=out
        )
        try:
            while True:
                with suppress(OSError):
                    if b"drumline_loss{" in scrape():
                        break
                time.sleep(0.5)
            ranks = json.loads((folder / "run" / "environment.json").read_text())["ranks"]
            pids = [rank["pid"] for rank in ranks]
            sidecar = [sidecar_of(pids[0])]
            moments = [Moment(time.time(), processor_s(pids), processor_s(sidecar))]
            for number in range(num_intervals):
                while time.time() < moments[-1].time + INTERVAL_S:
                    if number % 2:
                        scrape()
                    time.sleep(SCRAPE_S)
                moments.append(Moment(time.time(), processor_s(pids), processor_s(sidecar)))
        finally:
            job.terminate()
            job.wait()
    times = step_times(folder / "run" / "events" / "rank-00000.jsonl")
    return [interval(times, begin, end) for begin, end in pairwise(moments)]


def show_ratio(what: str, values: list[float]) -> None:
    ratios = [scraped / alone for alone, scraped in zip(values[::2], values[1::2], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{what}, scraped twice a second / not scraped: {middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--intervals", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(options.intervals, Path(folder))
    show_ratio("the ranks' processor time for a step", [each.ranks_s for each in measured])
    show_ratio("steps a second", [each.steps_per_s for each in measured])
    shares = [
        statistics.median(each.sidecar_share for each in measured[first::2]) for first in (0, 1)
    ]
    print(f"the sidecar uses {shares[0]:.1%} of a core, scraped {shares[1]:.1%}")


if __name__ == "__main__":
    main()
