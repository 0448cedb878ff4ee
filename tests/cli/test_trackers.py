"""The real trackers: W&B offline, an MLflow server of its own and TensorBoard, through a kill and
while one hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.runs.events import read_events
from tests.cli.test_command import drumline
from tests.ranks import free_port
from tests.unit.metrics.test_tensorboard import PNG, curves
from tests.warm import warm_python

pytestmark = pytest.mark.usefixtures("warm_trackers")
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
}
# To import these takes longer than all that is done with them. Not W&B: it makes a folder then, and
# the first process that ends removes it.
PACKAGES = ("mlflow.server", "torch.utils.tensorboard")
# Rank 0 is killed once, in step 8, when step 5 was the last to be saved and the trackers had some
# steps.
KILLED_ONCE = """
import os, signal, time
from pathlib import Path
import numpy as np
from drumline import Hook
from drumline.metrics.trackers import tracking
from drumline.training.tasks import ImageClassification

tracking.CLOSE_S = tracking.MAX_CLOSE_S  # on a busy machine W&B needs long to end

class Logs(Hook):
    def after_step(self, run):
        if run.step in (3, 6):
            run.log("digit", np.eye(6, 8, dtype=np.uint8))
            run.log("poem/first", "a <rose>")
            run.log("norm/a b%", 2.0)

class KilledOnce(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.steps": 12, "train.batch_size": 64,
        "checkpoint.every_steps": 5, "checkpoint.background": False, "log.every_steps": 1,
    }
    step = 0

    def hooks(self):
        return [Logs()]

    def loss(self, model, batch):
        self.step += model.training
        if os.environ["RANK"] == "0" and self.step == 8 and not Path("killed").exists():
            Path("killed").touch()
            log = Path("tracked/logs/rank-00000.log")
            while not all(f" {name}: " in log.read_text() for name in ("wandb", "mlflow", "tensorboard")):
                time.sleep(0.05)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""
# In step 5 the server stops to answer.
SERVER_HANGS = """
import os, signal, time
from pathlib import Path
from drumline.metrics.trackers import tracking
from drumline.training.tasks import ImageClassification

tracking.CLOSE_S = 1.0
LOSSES = "*/*/metrics/train/loss"  # by experiment and run; in step 5 there are those of the steps before

class ServerHangs(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.steps": 12, "train.batch_size": 64, "log.every_steps": 1
    }
    step = 0

    def loss(self, model, batch):
        self.step += model.training
        if self.step == 5:
            store = Path(os.environ["STORE"])
            while not any(b"hangs" in (run.parents[3] / "meta.yaml").read_bytes() for run in store.glob(LOSSES)):
                time.sleep(0.05)
            os.kill(int(os.environ["SERVER"]), signal.SIGSTOP)
        return super().loss(model, batch)
"""
SERVE = """
import os, sys
from pathlib import Path
from mlflow.server import app

Path(sys.argv[1]).write_text(str(os.getpid()))
app.run(host="127.0.0.1", port=int(sys.argv[2]), threaded=True)
"""
# Its transaction log is LevelDB's: blocks of 32 kB, pieces of records with a checksum, a length and
# a kind.
READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

data, at, piece, records = Path(sys.argv[1]).read_bytes(), 7, b"", []
while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
        at += left
        continue
    size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    piece += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind not in (1, 4):  # more of it follows
        continue
    record, piece = Record.FromString(piece), b""
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = record.history.item
        records.append(["history", {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}])
    elif kind == "run":
        config = {i.key: json.loads(i.value_json) for i in record.run.config.update}
        records.append(["run", {"id": record.run.run_id, "project": record.run.project, "config": config}])
    elif kind == "exit":
        records.append(["exit", record.exit.exit_code])
print(json.dumps(records))
"""


class Server(NamedTuple):
    url: str
    pid: int
    store: Path

    def get(self, path: str, **body: Any) -> Any:
        """Its REST API, without MLflow's own client."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        experiment_id = self.get(f"experiments/get-by-name?experiment_name={experiment}")[
            "experiment"
        ]["experiment_id"]
        runs: list[dict[str, Any]] = self.get("runs/search", experiment_ids=[experiment_id])["runs"]
        return runs

    def steps(self, run: dict[str, Any], metric: str) -> list[int]:
        history = self.get(
            f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={metric}"
        )
        return [int(metric.get("step", 0)) for metric in history["metrics"]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python that has the trackers' packages loaded."""
    # MLflow's server looks for its store when it is imported, and then has its middleware against
    # foreign hosts.
    environment = {**QUIET, "_MLFLOW_SERVER_FILE_STORE": "unused"}
    with warm_python(
        tmp_path_factory.mktemp("warm") / "bin", *PACKAGES, environment=environment
    ) as program:
        yield program


@pytest.fixture
def warm_trackers(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    environment = {
        **os.environ,
        **QUIET,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "_MLFLOW_SERVER_FILE_STORE": str(folder / "store"),
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
    }
    (folder / "serve.py").write_text(SERVE)
    command = [python, str(folder / "serve.py"), str(folder / "pid"), str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(f"{url}/health"):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield Server(url, int((folder / "pid").read_text()), folder / "store")
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def own_wandb(folder: Path) -> dict[str, str]:
    """So that W&B writes nothing to the user's own folders."""
    return {
        **QUIET,
        **{f"WANDB_{name}_DIR": str(folder / "wandb-own") for name in ("CONFIG", "CACHE", "DATA")},
    }


def wandb_records(run: Path) -> list[list[Any]]:
    (file,) = (run / "wandb" / "latest-run").glob("*.wandb")
    (run / "read.py").write_text(READ_WANDB)
    command = [sys.executable, str(run / "read.py"), str(file)]
    output = subprocess.run(command, check=True, capture_output=True, text=True)
    records: list[list[Any]] = json.loads(output.stdout)
    return records


@pytest.mark.soak
def test_a_killed_run_is_one_run_and_one_curve_in_every_tracker(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "mine.py").write_text(KILLED_ONCE)
    result = drumline(
        *("train", "mine.py:KilledOnce", "--procs", "2", "--run", "tracked"),
        *("--log.trackers", "wandb,mlflow,tensorboard"),
        cwd=tmp_path,
        **own_wandb(tmp_path),
        WANDB_PROJECT="digits",
        MLFLOW_TRACKING_URI=server.url.replace("//", "//someone:secret@"),
        MLFLOW_EXPERIMENT_NAME="killed",
    )
    assert result.returncode == 0, result.stderr
    assert "restart 1 of" in result.stderr
    steps = [*range(1, 13)]

    (run,) = server.runs("killed")
    assert (run["info"]["run_name"], run["info"]["status"]) == ("tracked", "FINISHED")
    assert server.steps(run, "train/loss") == server.steps(run, "train/lr") == steps
    assert server.steps(run, "evaluation/accuracy") == [12]
    assert {"key": "model.widths", "value": "[4]"} in run["data"]["params"]
    assert server.steps(run, "norm/a%20b_") == [3, 6], "in the letters that MLflow takes"
    files = server.get(f"artifacts/list?run_id={run['info']['run_id']}&path=media")["files"]
    names = [
        f"{name}-0000000{step}.{kind}"
        for name, kind in (("digit", "png"), ("poem-first", "txt"))
        for step in (3, 6)
    ]
    assert [file["path"] for file in files] == [f"media/{name}" for name in names]

    records = wandb_records(tmp_path / "tracked")
    ids = [value["id"] for kind, value in records if kind == "run"]
    assert set(ids) == {
        json.loads((tmp_path / "tracked" / "trackers" / "wandb.json").read_text())["run"]
    }
    assert len([*(tmp_path / "tracked" / "wandb").glob("offline-run-*")]) == 2, (
        "one for each start, of one id"
    )
    history = [value for kind, value in records if kind == "history"]
    assert [row["_step"] for row in history if "train/loss" in row] == steps
    assert [row["_step"] for row in history if "evaluation/accuracy" in row] == [12]
    begun = next(value for kind, value in records if kind == "run")
    assert (begun["project"], begun["config"]["model.widths"]) == ("digits", [4])
    assert ["exit", 0] in records
    assert [(row["_step"], row["digit/width"]) for row in history if "norm/a b%" in row] == [
        (3, 8),
        (6, 8),
    ]
    media = tmp_path / "tracked" / "wandb" / "latest-run" / "files" / "media"
    assert [file.read_bytes() for file in media.rglob("*.png")] == [PNG, PNG]
    assert ["<pre>a &lt;rose&gt;</pre>" in file.read_text() for file in media.rglob("*.html")] == [
        True,
        True,
    ]

    board = curves(tmp_path / "tracked" / "tensorboard")
    assert [step for step, _ in board["norm/a b%"]] == [3, 6]
    assert [step for step, _ in board["train/loss"]] == steps
    for path in (tmp_path / "tracked").rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes(), path
    assert "secret" not in result.stdout + result.stderr


@pytest.mark.soak
def test_a_server_that_stops_to_answer_does_not_hold_the_run_up(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "mine.py").write_text(SERVER_HANGS)
    try:
        result = drumline(
            *("train", "mine.py:ServerHangs", "--run", "run", "--log.trackers", "mlflow"),
            cwd=tmp_path,
            **QUIET,
            SERVER=str(server.pid),
            STORE=str(server.store),
            MLFLOW_TRACKING_URI=server.url,
            MLFLOW_EXPERIMENT_NAME="hangs",
        )
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert result.returncode == 0, result.stderr
    events = [*read_events(tmp_path / "run" / "events" / "rank-00000.jsonl")]
    assert [event["step"] for event in events if event["kind"] == "train"] == [*range(1, 13)]
    end, warning = events[-2:]
    assert end["kind"] == "end"
    assert warning["message"].startswith("mlflow does not answer, and lacks ")
    (run,) = server.runs("hangs")
    steps = server.steps(run, "train/loss")
    assert 1 <= len(steps) < 12

    # The same command shows the result of the finished run again, and brings what the server lacks.
    (tmp_path / "mine.py").write_text(SERVER_HANGS.replace("if self.step == 5", "if False"))
    # on a busy machine the server may take longer to answer than the end of a run waits for it
    for _ in range(6):
        again = drumline(
            *("train", "mine.py:ServerHangs", "--run", "run", "--log.trackers", "mlflow"),
            cwd=tmp_path,
            **QUIET,
            MLFLOW_TRACKING_URI=server.url,
            MLFLOW_EXPERIMENT_NAME="hangs",
        )
        assert again.returncode == 0, again.stderr
        if "mlflow does not answer" not in again.stdout:
            break
    (run,) = server.runs("hangs")
    assert sorted(server.steps(run, "train/loss")) == [*range(1, 13)]
    # Sent again where the answer came too late.
    assert set(server.steps(run, "evaluation/loss")) == {12}
    assert run["info"]["status"] == "FINISHED"
