"""The command as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

from drumline.config.fields import FIELDS
from drumline.runs.events import read_events
from drumline.watch.run_status import RunStatusReader
from tests.cli.test_interrupts import POINTS, wait_for
from tests.conftest import children_that_stay
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
SMALL = ["--model.widths", "8", "--train.steps", "6", "--log.every_steps", "5"]
BROKEN_TASK = """
import os
from drumline.training.tasks import ImageClassification

class Broken(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.epochs": 1, "train.batch_size": 64}
    seen = 0

    def loss(self, model, batch):
        self.seen += 1
        if self.seen == 4 and os.environ.get("RANK", "0") == "1":
            {what}
        return super().loss(model, batch)
"""


def python_m(module: str) -> list[str]:
    """Cold, or warm in a test that asks for that."""
    return [sys.executable, "-m", module]


def drumline(
    *arguments: str, cwd: Path, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python_m("drumline"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def torch_blocked(cwd: Path) -> dict[str, str]:
    """An environment in which importing torch is an error."""
    (cwd / "torch.py").write_text("raise ImportError('torch was imported')")
    return {"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}"}


def test_help_teaches_and_needs_no_torch(tmp_path: Path) -> None:
    environment = torch_blocked(tmp_path)
    top = drumline("--help", cwd=tmp_path, **environment)
    assert top.returncode == 0
    assert "train         train a task" in top.stdout
    assert max(map(len, top.stdout.splitlines())) <= 80
    train = drumline("train", "--help", cwd=tmp_path, **environment)
    assert train.returncode == 0
    missing = [path for path in FIELDS if f"--{path}" not in train.stdout]
    assert FIELDS
    assert not missing
    assert "--procs" in train.stdout
    assert drumline("--version", cwd=tmp_path, **environment).stdout.startswith("drumline ")


def test_no_verb_and_a_wrong_verb(tmp_path: Path) -> None:
    nothing = drumline(cwd=tmp_path)
    assert (nothing.returncode, nothing.stdout.startswith("usage: drumline VERB")) == (2, True)
    wrong = drumline("trian", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "there is no verb 'trian'; did you mean 'train'?" in wrong.stderr


def test_all_config_errors_come_at_once_and_before_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        [optim]
        lr = -1
        momentom = 0.9
        scale_lr = "linear"
        [train]
        precision = "fp8"
        """
    )
    result = drumline(
        *("train", "digits", "--config", "run.toml", "--train.batch_size", "many", "--procs", "0"),
        *("--train.epochs", "2", "--train.steps", "9"),
        cwd=tmp_path,
        **torch_blocked(tmp_path),
    )
    assert result.returncode == 2, result.stderr
    for part in (
        "7 problems in the configuration",
        "optim.lr",
        "momentom",
        "did you mean 'optim.momentum'?",
        "fp8",
        "many",
        "--procs",
        "train.epochs and train.steps exclude each other",
        "scale_lr",
    ):
        assert part in result.stderr, f"{part} is missing in {result.stderr}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no TASK was given: one of digits, cifar10, text, synthetic"),
        (["digit"], "'digit': there is no such task; did you mean 'digits'?"),
        (["cifar10"], "cifar10"),
        (["own.py"], "'own.py': there is no such task; add the class, as in own.py:ClassName"),
        (["nowhere.py:Task"], "there is no file nowhere.py"),
        (["digits", "--model.name", "resnet"], "mini_resnet"),
        (["digits", "--run", "/proc/nowhere"], "the run folder /proc/nowhere cannot be made"),
    ],
)
@pytest.mark.usefixtures("warm")
def test_wrong_commands_are_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = drumline("train", *arguments, cwd=tmp_path)
    assert result.returncode in (2, 3), result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_train_on_two_ranks_then_again_then_by_torchrun(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time in cold processes, and beside interrupts that are ignored."""
    # Bits depend on it; torchrun gives each rank one thread, we share the cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ("train", "digits", "--procs", "2", *SMALL)
    code, output, errors = train_beside_interrupts(*command, cwd=tmp_path)
    assert (code, errors) == (0, ""), output
    run = tmp_path / "runs" / "digits"
    for word in (
        "accuracy",
        "samples/s",
        "runs/digits",
        "drumline train digits --procs 2",
        "drumline launch --hosts HOST_A,HOST_B --procs 2 ",
    ):
        assert word in output, f"{word} is missing in {output}"
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["model"]["widths"] == [8]
    environment = json.loads((run / "environment.json").read_text())
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    for rank in (0, 1):
        kinds = [event["kind"] for event in read_events(run / "events" / f"rank-{rank:05d}.jsonl")]
        assert {"start", "train", "evaluation", "end"} <= set(kinds)
    logs = [(run / "logs" / f"rank-{rank:05d}.log").read_text() for rank in (0, 1)]
    assert ["done: " in log for log in logs] == [True, False], "rank 0 tells how the run goes"
    request.getfixturevalue("warm")
    again = drumline(
        "train", "digits", "--procs", "2", "--config", str(run / "config.toml"), cwd=tmp_path
    )
    assert again.returncode == 0, again.stderr
    assert "this run has finished" in again.stdout
    # torchrun's ranks are the same run.
    result = subprocess.run(
        [
            *python_m("torch.distributed.run"),
            "--nproc-per-node",
            "2",
            "-m",
            "--",
            "drumline",
            "train",
            "digits",
            "--run",
            "theirs",
            *SMALL,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "--log.every_steps 5 --procs 2\n" in result.stdout.replace("\\\n      ", ""), (
        result.stdout
    )
    ours, theirs = (
        (folder / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes()
        for folder in (run, tmp_path / "theirs")
    )
    assert ours == theirs


def train_beside_interrupts(*words: str, cwd: Path) -> tuple[int, str, str]:
    """Started as a shell does it for a command with `&`: Ctrl-C is meant for the one in front of
    it. Its exit code, output and errors."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [*python_m("drumline"), *words],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        for is_there in POINTS.values():
            wait_for(process, partial(is_there, process.pid))
            os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output, errors


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("launcher", ["procs", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_the_rank_that_raises_is_shown_first_and_once(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "broken.py").write_text(
        BROKEN_TASK.replace("{what}", "raise ValueError('boom at four')")
    )
    started = time.monotonic()
    if launcher == "procs":
        result = drumline("train", "broken.py:Broken", "--procs", "2", cwd=tmp_path)
    else:
        result = subprocess.run(
            [
                *python_m("torch.distributed.run"),
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "drumline",
                "train",
                "broken.py:Broken",
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert result.returncode == 1
    assert time.monotonic() - started < 60, "it did not wait for a timeout"
    assert result.stderr.count("ValueError: boom at four\n".replace("\\\n", "\n")) >= 1
    first = result.stderr.index("drumline: error: rank 1 on ")
    assert "crashed at step 3: ValueError: boom at four" in result.stderr[first:].splitlines()[0]
    assert result.stderr.count("Traceback (most recent call last)") == (
        1 if launcher == "procs" else 2
    ), result.stderr
    assert "in loss" in result.stderr
    assert "restarting the ranks" not in result.stderr, "it would fail at the same step"
    events = list(read_events(tmp_path / "runs" / "Broken" / "events" / "rank-00001.jsonl"))
    assert (events[-1]["kind"], events[-1]["message"]) == ("error", "ValueError: boom at four")
    log = (tmp_path / "runs" / "Broken" / "logs" / "rank-00001.log").read_text()
    assert "ValueError: boom at four" in log


@pytest.mark.usefixtures("warm")
def test_a_task_that_cannot_be_loaded_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    result = drumline("train", "broken.py:Broken", "--procs", "2", cwd=tmp_path)
    assert result.returncode == 1
    assert (
        "crashed: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
        in result.stderr
    )
    assert result.stderr.count("Traceback") == 1, result.stderr
    (tmp_path / "wrong.py").write_text(
        "import drumline\nclass Wrong(drumline.Task):\n    defaults = {'optim.lr': -1, 'train.epoch': 3}\n"
    )
    result = drumline("train", "wrong.py:Wrong", "--procs", "2", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("Wrong.defaults: optim.lr = -1.0 must be above 0") == 1, (
        result.stderr
    )
    assert "did you mean 'train.epochs'?" in result.stderr


def test_procs_that_contradict_the_launcher_are_refused(tmp_path: Path) -> None:
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    result = drumline("train", "digits", "--procs", "4", cwd=tmp_path, **place)
    assert result.returncode == 2
    assert "--procs is 4, but a launcher has started 2 ranks here" in result.stderr


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_an_agent_the_first_failure_is_reported_once_too(tmp_path: Path, rank: str) -> None:
    """As under srun: nobody ends the other ranks, and rank 0 runs the store."""
    (tmp_path / "broken.py").write_text(
        BROKEN_TASK.replace("{what}", "raise ValueError('boom at four')").replace(
            '== "1"', f'== "{rank}"'
        )
    )
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [*python_m("drumline"), "train", "broken.py:Broken"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **shared, "RANK": name, "LOCAL_RANK": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("0", "1")
    ]
    errors = "".join(process.communicate(timeout=120)[1] for process in ranks)
    assert [process.returncode for process in ranks] == [1, 1]
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert f"drumline: error: rank {rank} on " in errors


@pytest.mark.usefixtures("warm")
def test_a_rank_that_leaves_by_sys_exit_is_a_failure_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_TASK.replace("{what}", "raise SystemExit(0)"))
    result = drumline("train", "broken.py:Broken", "--procs", "2", cwd=tmp_path)
    assert result.returncode == 1
    assert (
        result.stderr.count("error: sys.exit(0) was called before the end of the run [rank 1 on ")
        == 1
    )
    assert result.stderr.count("sys.exit(0)") == 1, "one report"
    assert "restarting the ranks" not in result.stderr


@pytest.mark.usefixtures("warm")
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_TASK.replace("{what}", "os.kill(os.getpid(), 9)"))
    result = drumline(
        "train", "broken.py:Broken", "--procs", "2", "--max-restarts", "0", cwd=tmp_path
    )
    assert result.returncode == 1
    # By the watch; or by the launcher, should the sidecar not be there yet, so shortly after the
    # start.
    assert re.search(r"rank 1 (on \S+ )?was (killed|ended) by SIGKILL", result.stderr)
    assert result.stderr.count("SIGKILL") == 1


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("num_procs", [1, 2])
def test_ctrl_c_ends_every_process_and_the_run_can_continue(tmp_path: Path, num_procs: int) -> None:
    command = [
        "train",
        "digits",
        "--procs",
        str(num_procs),
        "--model.widths",
        "8",
        "--checkpoint.every_steps",
        "5",
    ]
    command += ["--train.epochs", "500"]
    process = subprocess.Popen(
        [*python_m("drumline"), *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    checkpoints = tmp_path / "runs" / "digits" / "checkpoints"
    while process.poll() is None and not list(checkpoints.glob("step-*")):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (
        errors.count("interrupted; rerun the same command to resume from the newest checkpoint\n")
        == 1
    )
    assert "Traceback" not in errors
    assert list(checkpoints.glob("step-*"))
    assert RunStatusReader(checkpoints.parent).read().state == "stopped"
    assert not children_that_stay()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits"],
        pytest.param(["launch", "--procs", "2", "digits"], marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_before_the_first_save_promises_no_checkpoint(
    tmp_path: Path, words: list[str]
) -> None:
    process = subprocess.Popen(
        [
            *python_m("drumline"),
            *words,
            "--model.widths=8",
            "--train.epochs=500",
            "--checkpoint.every_epochs=0",
            "--run=here",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    events = tmp_path / "here" / "events" / "rank-00000.jsonl"
    while process.poll() is None and not (events.exists() and '"first_step"' in events.read_text()):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (
        errors.count("drumline: interrupted before the first save; rerun the same command to start")
        == 1
    )
    assert not list((tmp_path / "here" / "checkpoints").glob("step-*"))


OTHER_LETTERS = """
from drumline.training.tasks import ImageClassification

class Größe(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.steps": 4, "train.batch_size": 64}
    best_metric = "treffer"

    def configure_optimizers(self):
        print("never")

    def report(self, means):
        print("größe")
        return {**means, "größe": 1.0}
"""


@pytest.mark.usefixtures("warm")
def test_letters_that_the_output_cannot_have_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "eigen.py").write_text(OTHER_LETTERS, encoding="utf-8")
    command = ("train", "eigen.py:Größe", "--run", "läufe", "--procs", "2")
    result = drumline(*command, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "run folder   l\\xe4ufe" in result.stdout
    assert "   gr\\xf6\\xdfe 1.0000   in " in result.stdout
    assert "\ngr\\xf6\\xdfe\n" in result.stdout, "what the user prints, too"
    assert "warning: Gr\\xf6\\xdfe.configure_optimizers() is never called: " in result.stdout
    assert result.stdout.count("treffer") == 1
    assert "Größe.best_metric is 'treffer'" in (tmp_path / "läufe/logs/rank-00000.log").read_text(
        "utf-8"
    )


@pytest.mark.usefixtures("warm")
def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    slow = BROKEN_TASK.replace("{what}", "pass").replace(
        "self.seen += 1", "import time; time.sleep(0.3)"
    )
    (tmp_path / "slow.py").write_text(slow.replace("class Broken", "class Slow"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [*python_m("drumline"), "train", "slow.py:Slow", "--run", "run"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        while not (tmp_path / "run" / "environment.json").exists():
            assert first.poll() is None
            time.sleep(0.1)
        (owner,) = json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"]
        second = drumline("train", "slow.py:Slow", "--run", "run", cwd=tmp_path)
        assert second.returncode == 2
        assert f"another job (process {owner['pid']} on " in second.stderr
    finally:
        first.kill()
        first.communicate()
