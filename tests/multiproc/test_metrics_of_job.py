"""/metrics of real jobs whose rank is stopped or holds the GIL, as a scrape and as a real Prometheus
reads it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.metrics_node import Figures, parsed, scrape, value
from tests.metrics_pages import RULES
from tests.ranks import free_port

LIMIT_S = 90.0
DIGITS = (
    "train digits --procs 2 --run run --model.widths 4 --train.steps 100000 --train.batch_size 32 --data.workers 0 "
    "--watch.on_hang report --log.display none --checkpoint.every_steps 20 --log.every_steps 5"
)
# Rank 1 calls into C, which keeps the GIL, when it is asked to.
HOLDS_GIL = """
import ctypes, os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
while True:
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02)
    if os.path.exists("hold") and dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(600)
"""


@contextmanager
def job(folder: Path, words: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "drumline", *words.split()],
            cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(port: int, is_reached: Callable[[Figures], bool], folder: Path) -> Figures:
    """The first figures that are so."""
    end = time.monotonic() + LIMIT_S
    figures: Figures = {}
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            figures = parsed(scrape(port))
            if is_reached(figures):
                return figures
        time.sleep(0.1)
    raise AssertionError(f"{figures}\n{(folder / 'out.txt').read_text()}")


def stop_rank(folder: Path, rank: int) -> int:
    """With SIGSTOP; its process."""
    ranks = json.loads((folder / "run" / "environment.json").read_text())["ranks"]
    pid: int = ranks[rank]["pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.usefixtures("warm")
def test_a_job_whose_rank_is_stopped_is_scraped(tmp_path: Path) -> None:
    port = free_port()
    with job(tmp_path, f"{DIGITS} --log.prometheus {port}"):

        def is_reached(now: Figures) -> bool:
            return value(now, "checkpoint_step") >= 20 and value(now, "step", rank=1) >= 20

        figures = wait_for(port, is_reached, tmp_path)
        assert 0 < value(figures, "loss") < 5
        assert value(figures, "samples_per_second") > 0
        assert value(figures, "rank_up", rank=1) == 1
        pid = stop_rank(tmp_path, 1)
        try:
            figures = wait_for(
                port,
                lambda now: (
                    value(now, "rank_up", rank=1) == 0
                    and sum(
                        number
                        for (name, labels), number in now.items()
                        if name == "drumline_faults_total" and ("cause", "stopped") in labels
                    )
                    > 0
                ),
                tmp_path,
            )
            assert value(figures, "heartbeat_age_seconds", rank=1) > 1
            if shutil.which("promtool"):
                command = ["promtool", "check", "metrics"]
                done = subprocess.run(
                    command, input=scrape(port), capture_output=True, text=True, check=False
                )
                assert (done.returncode, done.stderr) == (0, "")
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("warm")
def test_a_script_whose_rank_holds_the_gil_is_scraped(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "script.py").write_text(HOLDS_GIL)
    words = f"launch --procs 2 --watch --on-hang report --grace 1 --prometheus {port} script.py"
    with job(tmp_path, words):
        wait_for(port, lambda now: value(now, "step", rank=1) > 5, tmp_path)
        (tmp_path / "hold").touch()
        figures = wait_for(
            port, lambda now: value(now, "heartbeat_age_seconds", rank=1) > 2, tmp_path
        )
        assert value(figures, "restarts_total") == 0
        assert "drumline_loss" not in {name for name, _ in figures}


@pytest.mark.parametrize(
    "words",
    ["'train', 'digits', '--log.prometheus', '9464'", "'launch', '--watch', '--prometheus', '9464', 'a.py'"],
)  # fmt: skip
def test_a_missing_extra_is_an_error_before_torch_is_loaded(tmp_path: Path, words: str) -> None:
    (tmp_path / "a.py").touch()
    program = (
        "import sys; sys.modules['prometheus_client'] = None; from drumline.cli import main; "
        f"code = main([{words}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "prometheus needs a package that is not installed" in done.stderr
    assert "pip install 'prometheus_client" in done.stderr


CONFIG = """
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: drumline
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def ask_prometheus(port: int, path: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=5) as answer:
        return json.load(answer)["data"]


@pytest.mark.soak
def test_a_real_prometheus_sees_the_stopped_rank_and_its_alerts_fire(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    port, own_port = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(port=port))
    (tmp_path / "alerts.yml").write_text(RULES.read_text().replace("for: 1m", "for: 1s"))
    command = [
        "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{own_port}",
    ]  # fmt: skip
    with (
        job(tmp_path, f"{DIGITS} --log.prometheus {port}"),
        (tmp_path / "prometheus.txt").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as prometheus,
    ):
        try:
            wait_for(port, lambda now: value(now, "checkpoint_step") >= 20, tmp_path)
            time.sleep(3)
            pid = stop_rank(tmp_path, 1)
            fired: set[str] = set()
            end = time.monotonic() + LIMIT_S
            while not {"DrumlineRankDown", "DrumlineHang"} <= fired and time.monotonic() < end:
                time.sleep(0.5)
                alerts = ask_prometheus(own_port, "alerts")["alerts"]
                fired = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}  # fmt: skip
            os.kill(pid, signal.SIGCONT)
            assert {"DrumlineRankDown", "DrumlineHang"} <= fired
            (up,) = ask_prometheus(own_port, "query?query=up")["result"]
            assert up["value"][1] == "1"
        finally:
            prometheus.terminate()
