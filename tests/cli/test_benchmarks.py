"""The benchmarks run: every table is made in small shapes, with the files for docs/performance.md.

Whether anything is fast is not asked here. Without a group, and without peers: they take seconds to
load, and not all are among the tools of a developer; the table then says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.harness import Way, measure
from benchmarks.options import Options
from benchmarks.photos import PhotoBytes, Photos, prepared
from benchmarks.report import Goal, Row, Table, publish, text_of
from benchmarks.resnet50 import ResNet50
from benchmarks.stopping import _guard
from drumline.config.schema import WatchConfig
from drumline.data.dataset import BatchMaker, BatchRequest
from drumline.training.manager import RunManager

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def options(folder: Path, table: str) -> Options:
    return Options(
        tables=[table],
        out=folder / "out",
        rounds=1,
        tiny=True,
        device="cpu",
        micro_batch=4,
        workers=1,
        ranks=None,
        limit=None,
        only="by hand,ours,torch.save,DCP,card,DataLoader",
        folder=folder,
    )


SOAK = (
    pytest.param(name, marks=pytest.mark.soak)
    for name in ("step", "resnet", "loading", "gpt", "save")
)


@pytest.mark.parametrize("name", ["cpu", *SOAK])
def test_a_table_is_made(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(tmp_path, name)
    with RunManager(seed=0, device="cpu", watch=WatchConfig(sidecar="off")) as ddp:
        table = importlib.import_module(f"benchmarks.tables.{name}").make(chosen, ddp)
    publish(table, chosen.out)
    if _guard.cache_info().currsize:  # it would end with this process
        _guard().kill()
        _guard().communicate()
        _guard.cache_clear()

    text = capsys.readouterr().out
    rows = [row for row in table.rows if "ours" in row.way]
    assert rows
    assert any(
        way in row.way for row in table.rows for way in ("by hand", "torch.save", "DataLoader")
    )
    assert all(row.failure is None and row.values for row in table.rows)
    assert all(row.way in text for row in table.rows)
    if name == "resnet":
        assert "share of the card: by hand " in text
    if name == "gpt":
        assert (
            "ours, eager, everything on: 1 saves in 1 blocks; by the run's own events each stopped it"
            in text
        )
    if name not in ("cpu", "save", "loading") and importlib.util.find_spec("accelerate") is None:
        assert (
            "accelerate is not installed, so its rows are missing: pip install 'drumline[bench]'"
            in text
        )
    document = json.loads((chosen.out / f"{table.name}.json").read_text())
    assert [row["way"] for row in document["rows"]] == [row.way for row in table.rows]
    ElementTree.parse(chosen.out / f"{table.name}.svg")


@pytest.mark.soak
@pytest.mark.usefixtures("warm")
def test_the_table_with_loading_processes_is_made_by_its_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "images",
        "--tiny",
        "--rounds",
        "1",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [*command, "--limit", "120", "--only", "on the host", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "images.json").read_text())["rows"]
    assert "ours, data on the host" in {row["way"] for row in rows}
    assert all(row["failure"] is None and row["values"] for row in rows)
    assert (tmp_path / "images.txt").read_text() in done.stdout


def test_a_way_that_fails_does_not_lose_the_others() -> None:
    def endless(after_step: object) -> None:
        while True:
            after_step(3)  # type: ignore[operator]

    def broken(after_step: object) -> None:
        after_step(3)  # type: ignore[operator]
        raise ValueError("no more\nof this")

    good, bad, over = measure(
        [Way("good", endless), Way("bad", broken), Way("over", lambda after_step: after_step(1))],
        rounds=2,
        steps=5,
        warm_up=1,
    )

    assert (good.failure, good.samples) == (None, [15, 15])
    assert bad.failure == "ValueError: no more"
    assert over.failure == "RuntimeError: the loop ended before enough steps were taken"
    table = Table(
        "t",
        "title",
        "samples/s",
        [Row("good", good.per_second()), Row("bad", failure=bad.failure)],
        "how",
    )
    assert "bad  failed: ValueError: no more" in text_of(table)


def test_what_was_stopped_continues_when_the_rank_is_killed() -> None:
    """A worker that was forked from the rank holds all that the rank has open, and is stopped with
    the rest."""
    program = (
        "import os, signal, subprocess\n"
        "from benchmarks.stopping import resume, stop\n"
        "other = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "stop(other.pid), resume(other.pid), stop(other.pid)\n"
        "if (worker := os.fork()) == 0:\n"
        "    signal.pause()\n"
        "stop(worker)\n"
        "os.waitid(os.P_PID, worker, os.WSTOPPED)\n"
        "print(other.pid, worker, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        stopped = [int(pid) for pid in rank.stdout.readline().split()]
        assert rank.wait() == -signal.SIGKILL
        try:
            deadline = time.monotonic() + 30
            while "T" in {state_of(pid) for pid in stopped} and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "T" not in [state_of(pid) for pid in stopped]
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
    assert len(stopped) == 2


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_goal_says_whether_it_is_met() -> None:
    assert (
        Goal("images/s", 96_000, at_least=95_000).line() == "images/s, at least 95,000: 96,000, met"
    )
    assert Goal("ms", 26.0, at_most=25).line() == "ms, at most 25: 26.00, NOT MET"
    assert Goal("ratio", None, at_most=1.02).line() == "ratio, at most 1.02: not measured"


def test_bytes_prepared_on_the_device_are_the_samples_that_workers_would_prepare() -> None:
    photos = Photos(16, size=12, crop=8, num_images=16)
    photo_bytes = PhotoBytes(16, size=12, crop=8, num_images=16)
    photo_bytes.images = photos.images
    request = BatchRequest(3, 0, 16, shuffled=True)
    (floats, labels), (images, chances, same) = (
        BatchMaker(dataset, seed=0)[request] for dataset in (photos, photo_bytes)
    )
    batch = prepared(images, chances, 8)
    assert torch.equal(batch, floats)
    assert torch.equal(same, labels)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    parameters = sum(parameter.numel() for parameter in ResNet50(1000).parameters())
    assert parameters == 25_557_032  # torchvision's
