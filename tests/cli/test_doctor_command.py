"""`drumline doctor`: what it takes, what it refuses, and this machine on the screen and as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from drumline.base.errors import ExitCode, UsageError
from drumline.cli import main
from drumline.cli.doctor_command import OWN_FLAGS, _node_options
from drumline.config import FlagValues
from tests.ranks import free_port, rank_environment


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (
            "--hosts a,b --hostfile f",
            ["--hosts and --hostfile exclude each other: each lists the hosts"],
        ),
        ("--hosts a,b --nodes 2", ["--hosts uses ssh, and --nodes does not: give one of them"]),
        (
            "--ssh x --port 1",
            ["--ssh: belongs to --hosts and --hostfile", "--port: belongs to --hosts"],
        ),
        (
            "--procs 2 --backend gloo",
            ["--procs: belongs to --collectives", "--backend: belongs to --collectives"],
        ),
        ("--hosts a,b --no-collectives --procs 2", ["--procs: belongs to --collectives"]),
        ("--optim.lr 1", ["--optim.lr: is a setting of a run; the doctor takes none"]),
        ("--hoss a", ["did you mean"]),
        (
            "digits --hosts a,b --nodes 2",
            ["--hosts: a TASK is checked on this machine", "--nodes: a TASK"],
        ),
        ("--batches 2 --config f", ["--batches: belongs to a TASK", "--config: belongs to a TASK"]),
        ("digit", ["there is no such task; did you mean 'digits'"]),
        ("digits --optim.lr -1", ["optim.lr"]),
        ("--backend mpi --collectives", ["--backend"]),
        ("--hosts=-a", ["a host's name does not start with a dash"]),
        ("--nodes 2", ["--node-rank and --master are missing"]),
        ("--nodes 2 --node-rank 2 --master a", ["--node-rank is 2 of --nodes 2"]),
        ("--nodes 2 --node-rank 0 --master a:x", ["--master: 'x' is not a port"]),
        ("--nodes 2 --node-rank 0 --master ;", ["--master: ';' is not a host's name"]),
    ],
)
def test_wrong_usage_is_reported(
    words: str,
    problems: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_NNODES", "SLURM_NODEID", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", *words.split()]) == ExitCode.USAGE
    printed = capsys.readouterr().err
    for problem in problems:
        assert problem in printed


def test_help_tells_every_flag_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "--help"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for word in (
        *(f"\n  --{name}" for name in OWN_FLAGS),
        "DRUMLINE_SECRET",
        "3 something must be fixed",
    ):
        assert word in printed


def test_slurm_says_which_node_this_is() -> None:
    step = {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_STEP_NODELIST": "gpu[07-10]"}
    options = _node_options(FlagValues({"wait": 60}), step)
    assert (options.node, options.nodes, options.master, options.port, options.wait_s) == (
        3,
        4,
        "gpu07",
        29500,
        60.0,
    )
    options = _node_options(
        FlagValues({"node-rank": 0, "master": "10.0.0.1:1234"}),
        {**step, "DRUMLINE_SECRET": "s" * 16},
    )
    assert (options.node, options.master, options.port, options.secret) == (
        0,
        "10.0.0.1",
        1234,
        "s" * 16,
    )
    with pytest.raises(UsageError, match="--nodes is missing"):
        _node_options(FlagValues({"node-rank": 0, "master": "a"}), {})


def test_only_the_report_is_on_stdout_when_it_is_for_a_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "drumline.tools.doctor.pairs.without_ssh.join", lambda *_: {"result": "ready", "code": 0}
    )
    words = ["doctor", "--nodes=2", "--node-rank=1", "--master=a"]
    assert main(words) == 0
    assert capsys.readouterr().out == "node 1: ready (node 0 has the report)\n"
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    begins = [line.split()[0] for line in lines]
    assert begins[:4] == ["host", "Python", "torch", "driver"]
    assert lines[0].startswith(f"host                  {socket.gethostname()} (")
    assert any(line.startswith("variable              NCCL_DEBUG=WARN (") for line in lines)
    assert lines[-1].startswith("result: ready to train" if code == 0 else "result: not ready")
    assert main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["result"] == lines[-1]
    assert document["facts"][socket.gethostname()]["python"]


TASK = """
import torch
from drumline import Loss, Task

class Spare(Task):
    defaults = {"train.batch_size": 4, "train.steps": 1}

    def model(self):
        return torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "spare": torch.nn.Linear(2, 2)})

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(64, 2))

    def loss(self, model, batch):
        return Loss(model["used"](batch[0]).sum())
"""


def test_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "task_with_a_spare.py"
    file.write_text(TASK)
    words = [
        "doctor",
        f"{file}:Spare",
        "--dist.device",
        "cpu",
        "--run",
        str(tmp_path),
        "--batches",
        "2",
    ]
    assert main(words) == ExitCode.PREFLIGHT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert "parameters            4 trained, 2 unused in one or more of 2 batches" in lines
    problem = f"problem: {file}:Spare: none of 2 batches uses spare.weight and spare.bias: several ranks would wait"
    assert any(line.startswith(problem) for line in lines)
    main([*words, "--dist.static_graph", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["task"]["unused"] == {"spare.weight": 2, "spare.bias": 2}
    assert [
        finding for finding in document["findings"] if finding["check"] == "unused parameters"
    ] == []
    for name, value in rank_environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert main(words) == ExitCode.USAGE
    assert (
        "drumline doctor TASK is run once, but a launcher has started this process as a rank"
        in capsys.readouterr().err
    )


def test_an_interrupted_check_has_no_result_on_the_other_nodes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "drumline", "doctor", "--nodes=2"]
    master = f"--master=127.0.0.1:{free_port()}"
    environment = {**os.environ, "DRUMLINE_SECRET": "a secret of sixteen"}
    log = tmp_path / "node-0"
    with log.open("w") as file:
        first = subprocess.Popen(
            [*words, "--node-rank=0", master], env=environment, stdout=file, stderr=file
        )
    second = subprocess.Popen(
        [*words, "--node-rank=1", master], env=environment, stdout=PIPE, stderr=STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while "2 of 2 hosts answered" not in log.read_text():
        assert first.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    output, _ = second.communicate(timeout=60)
    assert first.wait(60) == 130
    assert second.returncode != 0, output
    assert "closed the connection before the end" in output
    assert "ready to train" not in output
