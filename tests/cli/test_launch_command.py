"""`drumline launch` as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main
from drumline.cli.jobs_command import read_job_command
from drumline.cli.launch_flags import OWN_FLAGS
from drumline.cli.launch_request import LaunchRequest
from drumline.config import FlagValues, read_flags
from drumline.launch.detached.commands import follow_command
from drumline.launch.hosts import Host
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
SECRET = "what both nodes were given"
SMALL = ["--model.widths", "4", "--train.steps", "2", "--train.batch_size", "32"]
DIES_ONCE = """
import os, signal, time
from pathlib import Path
from drumline.training.tasks import ImageClassification

class DiesOnce(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.steps": 4, "train.batch_size": 32,
        "checkpoint.every_steps": 2,
    }
    seen = 0

    def loss(self, model, batch):
        self.seen += 1
        if self.seen == 4 and os.environ["RANK"] == "1" and not Path("died").exists():
            while not Path("out/DiesOnce/checkpoints/step-00000002").exists():
                time.sleep(0.05)
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""
# Ranks that do not load torch: that they are started, named and ended is what is looked at.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "NOTE")
names += ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
said = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:]}
folder = Path(sys.argv[1])
starts = sorted(folder.glob(f"{said['RANK']}-*.json"))
(folder / f"{said['RANK']}-{len(starts)}.json").write_text(json.dumps(said))
if "fail" in sys.argv and said["RANK"] == "1":
    sys.exit(7)
if "hang-up" in sys.argv and said["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGHUP)
if "fail-once" in sys.argv and said["RANK"] == "1" and not starts:
    sys.exit(7)
while "fail-once" in sys.argv and not (folder / "1-1.json").exists():
    import time
    time.sleep(0.05)  # until the agent ends it, or the other was started again
"""


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    # of this process
    ours = ("DATASET_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", "launch", *arguments],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*started: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    try:
        ended = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


def launch(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    return finish(start(*arguments, cwd=cwd))[0]


def said(folder: Path) -> dict[str, dict[str, Any]]:
    """What each start of each rank wrote down, by `RANK-START`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.fixture(name="script")
def make_script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return "script.py"


def env_file(folder: Path, name: str, *, nodes: int, rank: int, port: int, more: str = "") -> str:
    (folder / name).write_text(
        f"NUMBER_OF_NODES={nodes}\nNODE_RANK={rank}\nNUMBER_OF_GPUS=1\nMASTER_ADDR=127.0.0.1\nMASTER_PORT={port}\n"
        f"DDP_TIMEOUT_SECONDS=77\n{more}"
    )
    return name


def test_a_script_runs_on_two_ranks_with_its_own_arguments(tmp_path: Path, script: str) -> None:
    # as nohup does it: the end of a terminal is not heeded
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    arguments = ["--procs", "9", "--", "hang-up"]
    try:
        code, _, errors = launch("--procs", "2", script, str(tmp_path), *arguments, cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, errors) == (0, "")
    text = said(tmp_path)
    assert text.keys() == {"0-0", "1-0"}
    for rank, words in enumerate(text.values()):
        assert (words["RANK"], words["WORLD_SIZE"], words["LOCAL_RANK"]) == (
            str(rank),
            "2",
            str(rank),
        )
        assert words["argv"] == [str(tmp_path), *arguments]
        # not torch's, which another user may have made
        cache = Path(words["TORCHINDUCTOR_CACHE_DIR"])
        assert (cache.name, cache.stat().st_mode & 0o777) == (
            f"drumline-compile-{os.geteuid()}",
            0o700,
        )
        assert words["TRITON_CACHE_DIR"] == str(cache / "triton")


@pytest.mark.usefixtures("warm")
def test_a_failing_script_ends_with_its_code_and_is_named(tmp_path: Path, script: str) -> None:
    code, _, errors = launch("--procs", "2", script, str(tmp_path), "fail", cwd=tmp_path)
    assert code == 7
    assert (
        errors
        == "drumline: script.py failed on rank 1 (exit code 7); the other ranks were stopped\n"
    )


@pytest.mark.usefixtures("warm")
def test_a_task_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    code, _, errors = launch("--procs", "1", "cifar10", "--data.dir", "nowhere", cwd=tmp_path)
    assert code == 3, errors
    assert errors.count("nowhere") == 1
    assert "restarting the ranks" not in errors


@pytest.mark.usefixtures("warm")
def test_two_nodes_started_by_hand_and_a_restart_of_both(tmp_path: Path, script: str) -> None:
    port = free_port()
    # The node with rank 1 first: people start them in any order.
    nodes = [
        start(
            *("--max-restarts", "1", "--env-file"),
            env_file(
                tmp_path,
                f"{rank}.env",
                nodes=2,
                rank=rank,
                port=port,
                more=f"NOTE='a secret'\nDRUMLINE_SECRET={SECRET}\n",
            ),
            *(script, str(tmp_path), "fail-once"),
            cwd=tmp_path,
        )
        for rank in (1, 0)
    ]
    ended = finish(*nodes)
    assert [code for code, *_ in ended] == [0, 0], ended
    text = said(tmp_path)
    assert text.keys() == {"0-0", "0-1", "1-0", "1-1"}
    assert {words["NOTE"] for words in text.values()} == {"a secret"}
    assert all(words["GROUP_RANK"] == words["RANK"] for words in text.values())
    outputs = [output for _, output, _ in ended]
    assert outputs == [f"drumline: node {rank} of 2 joins at 127.0.0.1:{port}\n" for rank in (1, 0)]
    # Forked with torch loaded, a launcher could not tell PyTorch's store to keep quiet about lost
    # connections.
    own = [
        [line for line in error.splitlines(True) if line.startswith("drumline:")]
        for *_, error in ended
    ]
    assert ["".join(lines) for lines in own] == [
        "drumline: restarting the ranks (restart 1 of 1); the script starts from the beginning\n",
        f"drumline: restarting the ranks (node 1 ({socket.gethostname()}) restarted); the script starts from the "
        "beginning\n",
    ]


@pytest.mark.usefixtures("warm")
def test_a_node_that_fails_is_named_on_the_other_node(tmp_path: Path) -> None:
    port = free_port()
    # Rank 0 ends, on the node that keeps the store; rank 1 does something else, and would do so for
    # long.
    (tmp_path / "apart.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '1':\n    Path('up').touch()\n    time.sleep(600)\n"
        "while not Path('up').exists():\n    time.sleep(0.05)\nsys.exit(7)\n"
    )
    files = [env_file(tmp_path, f"{rank}.env", nodes=2, rank=rank, port=port) for rank in range(2)]
    nodes = [start("--env-file", file, "apart.py", cwd=tmp_path) for file in files]
    (first, _, said_first), (second, _, said_second) = finish(*nodes)
    assert (first, second) == (7, 1), said_first + said_second
    name = f"node 0 ({socket.gethostname()})"
    assert f"drumline: error: {name} ended the job: rank 0 failed (exit code 7)\n" in said_second


@pytest.mark.usefixtures("warm")
def test_a_first_node_whose_port_is_taken_reports_it(tmp_path: Path, script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = env_file(tmp_path, ".env", nodes=2, rank=0, port=taken.getsockname()[1])
        code, _, errors = launch("--env-file", file, script, str(tmp_path), cwd=tmp_path)
    assert code == 3, errors
    assert f"of {socket.gethostname()} is in use" in errors
    assert (
        "try: end the process that uses it (another job, or an earlier start of this one?)"
        in errors
    )
    assert len(errors.splitlines()) == 2, (
        "the store's own words, a stack of its code, are not shown"
    )


@pytest.mark.usefixtures("warm")
def test_a_task_on_one_node_that_a_file_describes(tmp_path: Path) -> None:
    file = env_file(tmp_path, ".env", nodes=1, rank=0, port=free_port())
    code, output, errors = launch(
        "--env-file", file, "digits", *SMALL, "--run", "here", cwd=tmp_path
    )
    assert (code, errors) == (0, "")
    assert "on 1 rank" in output
    assert "train_timeout_s = 77" in (tmp_path / "here" / "config.toml").read_text()


@pytest.mark.usefixtures("warm")
def test_a_task_on_two_nodes_loses_a_rank_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DIES_ONCE)
    port = free_port()
    more = f"OUTPUT_DIR={tmp_path}/out\n"
    nodes = [
        start(
            "--env-file",
            env_file(tmp_path, f"{rank}.env", nodes=2, rank=rank, port=port, more=more),
            *("mine.py:DiesOnce", "--dist.start_timeout_s", "30"),
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    ended = finish(*nodes)
    assert [code for code, *_ in ended] == [0, 0], ended
    assert "on 2 ranks" in ended[0][1], "rank 0, which speaks, is on the node with NODE_RANK 0"
    run = tmp_path / "out" / "DiesOnce"
    assert f"resumed at step 2 from {run}" in ended[0][1]
    assert "(restart 1 of 3); they resume from the newest checkpoint" in ended[1][2]
    assert "to resume" not in ended[0][1], "that command would go on with one node"
    assert "train_timeout_s = 77" in (run / "config.toml").read_text()


def test_print_starts_nothing_and_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--print", "--procs", "2", "gone.py", "a b"]) == 0
    assert capsys.readouterr().out == (
        "torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 0 --rdzv-backend c10d "
        "--rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 -- gone.py 'a b'\n"
    )
    file = env_file(
        tmp_path, ".env", nodes=2, rank=1, port=29500, more="API_KEY=hunter2\nDATASET_DIR=/d\n"
    )
    assert main(["launch", "--env-file", file, "--print", "digits"]) == 0
    assert capsys.readouterr().out == (
        "# with these in the environment: API_KEY\n"
        "# plain torchrun numbers nodes by their addresses; give each its own number of ranks\n"
        "# node 0 of 2\n"
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 "
        "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29500 --rdzv-id drumline --rdzv-conf is_host=true "
        "--local-addr 127.0.0.1 -m -- drumline train digits --dist.train_timeout_s 77 --data.dir /d\n"
        "# node 1 of 2, this one\n"
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 "
        "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29500 --rdzv-id drumline --rdzv-conf is_host=false "
        "-m -- drumline train digits --dist.train_timeout_s 77 --data.dir /d\n"
    )
    assert (
        main(
            [
                "launch",
                "--env-file",
                file,
                "--print",
                "--nnodes",
                "1:",
                "--last-call",
                "9",
                "digits",
            ]
        )
        == 0
    )
    assert " --nnodes 1:2 " in (printed := capsys.readouterr().out)
    assert " --rdzv-conf is_host=false,last_call_timeout=9 " in printed
    (tmp_path / "hosts").write_text("me@a slots=2\nb\n")
    assert (
        main(["launch", "--hostfile", "hosts", "--print", "--procs", "4", "--port", "5", "x.py"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# me@a", "# b"]
    assert [
        ("-node 2 " in lines[1], "a:5 " in lines[1]),
        ("-node 4 " in lines[3], "a:5 " in lines[3]),
    ] == [(True, True), (True, True)]


@pytest.mark.usefixtures("warm")
def test_a_printed_line_runs(tmp_path: Path, script: str) -> None:
    _, line, _ = launch("--print", "--procs", "2", script, str(tmp_path), cwd=tmp_path)
    typed = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    subprocess.run(
        ["bash", "-c", typed], cwd=tmp_path, check=True, timeout=100, capture_output=True
    )
    assert said(tmp_path).keys() == {"0-0", "1-0"}


def test_a_manifest_is_printed_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--kubernetes", "--image", "i", "--pvc", "c"]
    assert main([*words, "digits"]) == 0
    printed = capsys.readouterr().out
    assert '- "/runs/digits"\n' in printed
    assert main([*words, "--out", "job.yaml", "digits"]) == 0
    assert (
        capsys.readouterr().err
        == "drumline: wrote job.yaml; apply it with: kubectl apply -f job.yaml\n"
    )
    assert (tmp_path / "job.yaml").read_text() == printed
    assert main([*words, "--out", "no/job.yaml", "digits"]) == 2
    assert "no/job.yaml cannot be written: No such file" in capsys.readouterr().err
    assert main([*words, "___.py"]) == 2
    assert (
        "no --name, and the job would be named after ___.py: '' is not a Kubernetes name"
        in capsys.readouterr().err
    )


def test_a_pod_template_is_merged_into_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "$(HOME)")
    Path("pod.yaml").write_text("spec: {priorityClassName: low}\n")
    words = ["launch", "--kubernetes", "--image", "i", "--pod-template", "pod.yaml"]
    words += ["--node-selector", "zone=a", "--env", "TOKEN", "--env", "A=b=c", "--grace", "200.5"]
    assert main([*words, "digits"]) == 0
    printed = capsys.readouterr().out
    for part in (
        '"priorityClassName": "low"\n',
        '"zone": "a"\n',
        '- "name": "TOKEN"\n          "value": "$$(HOME)"\n',
        '- "name": "A"\n          "value": "b=c"\n',
        '"terminationGracePeriodSeconds": 231\n',
        '- "--grace"\n        - "200.5"\n',
    ):
        assert part in printed
    Path("pod.yaml").write_text("spec: {restartPolicy: Always}\n")
    assert main([*words, "digits"]) == 2
    assert capsys.readouterr().err == (
        "drumline: error: 1 problem in --pod-template pod.yaml:\n"
        "  - spec.restartPolicy: the launch sets it\n"
        "  try: leave out what the launch sets; its flags are in drumline launch --help\n"
    )


# No cluster runs here; this stands for kubectl, to see what it is given.
KUBECTL = """#!/bin/sh
echo "$@" >> words
case "$1" in
get) [ -e secret.json ] && echo secret/digits-secret; exit 0 ;;
create) /bin/cat > secret.json; [ ! -e full ] ;;
apply) /bin/cat > applied.yaml; ! /bin/grep -q "image: \\"wrong\\"" applied.yaml || exit 4 ;;
esac
"""


def test_a_manifest_is_applied_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))  # this machine may have a kubectl
    words = ["launch", "--kubernetes", "--apply", "--image"]
    assert main([*words, "i", "digits"]) == 2
    assert (
        "--apply needs kubectl, which is not installed here\n  try: install kubectl"
        in capfd.readouterr().err
    )
    (tools / "kubectl").write_text(KUBECTL)
    (tools / "kubectl").chmod(0o755)
    assert main([*words, "i", "--out", "job.yaml", "digits"]) == 0
    assert (tmp_path / "words").read_text() == "apply -f -\n", "one pod needs no secret"
    assert (tmp_path / "applied.yaml").read_text() == (tmp_path / "job.yaml").read_text()
    assert main([*words, "wrong", "digits"]) == 3
    assert "kubectl refused the manifest (exit code 4)" in capfd.readouterr().err


def test_the_secret_is_created_before_the_manifest_is_applied_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    words = ["launch", "--kubernetes", "--apply", "--image", "i", "--namespace", "team"]
    words += ["--nodes", "2", "--out", "job.yaml", "digits"]
    (tmp_path / "full").touch()
    assert main(words) == 3
    message = "kubectl could not create the secret digits-secret (exit code 1); its output is above"
    assert message in capfd.readouterr().err
    assert not (tmp_path / "applied.yaml").exists()
    (tmp_path / "full").unlink()
    (tmp_path / "secret.json").unlink()
    (tmp_path / "words").unlink()
    assert main(words) == 0
    assert main(words) == 0
    get = "get secret digits-secret --namespace team --ignore-not-found -o name\n"
    create = "create --namespace team -f -\n"
    assert (tmp_path / "words").read_text() == f"{get}{create}apply -f -\n{get}apply -f -\n"
    secret = json.loads((tmp_path / "secret.json").read_text())
    assert secret["metadata"] == {"name": "digits-secret"}
    value = secret["stringData"]["secret"]
    assert len(value) == 64
    assert value not in (tmp_path / "applied.yaml").read_text() + capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ([], ["no TASK or SCRIPT.py was given"]),
        (["gone.py"], ["there is no file gone.py (looked in "]),
        (["digit"], ["'digit': there is no such task; did you mean 'digits'?"]),
        (["digits", "--optim.lrr", "1"], ["did you mean 'optim.lr'?"]),
        (
            ["digits", "--procs", "2"],
            [
                "--procs is a flag of the launch, but is given after the task's name\n"
                "  try: drumline launch --procs N digits"
            ],
        ),
        (["--optim.lr", "1", "digits"], ["--optim.lr: a setting of the task goes after its name"]),
        (["--prcs", "2", "digits"], ["1 problem", "--prcs: unknown flag; did you mean '--procs'?"]),
        (["--prcs", "digits"], ["1 problem", "did you mean '--procs'?"]),
        (["--hosts", "a,b", "x.py"], ["there is no file x.py (looked in "]),
        (
            ["--hosts", "a,-b,a", "digits"],
            ["'-b': a host's name does not start with a dash", "a is listed twice"],
        ),
        (["--hosts", "a", "--exclude", "x", "digits"], ["--exclude: needs --sync"]),
        (
            ["--hosts", "a", "--env", "NO_SUCH", "--env", "=hunter2", "digits"],
            [
                "--env NO_SUCH: is not set here; set it, or give --env NO_SUCH=VALUE",
                "--env: number 2 is neither",
            ],
        ),
        (
            ["--ssh", "'", "--hosts", "a", "digits"],
            ['--ssh "\'" cannot be read: No closing quotation'],
        ),
        (["--sync", "--env", "A", "digits"], ["--env: needs --hosts", "--sync: needs --hosts"]),
        (
            ["--hosts", "a", "--env-file", "e", "--print", "x.py"],
            ["--env-file and --hosts exclude each other"],
        ),
        (
            ["--env-file", "e", "--procs", "2", "--print", "x.py"],
            ["--procs: NUMBER_OF_GPUS in the --env-file"],
        ),
        (["--port", "1", "--print", "x.py"], ["--port: needs --hosts or --hostfile"]),
        (
            ["--nnodes", "1:2", "--last-call", "1", "x.py"],
            ["--nnodes: is for a job on several nodes", "--last-call: is for"],
        ),
        (
            ["--nnodes", "x", "--hosts", "a,b", "--print", "x.py"],
            ["--nnodes: 'x' is not understood; give a number"],
        ),
        (
            ["--nnodes", "1:3", "--hosts", "a,b", "--print", "x.py"],
            ["--nnodes is 1:3, but there are 2 in the list"],
        ),
        (["--image", "i", "--print", "x.py"], ["--image: needs --kubernetes"]),
        (
            [
                "--kubernetes",
                "--image",
                "a b",
                "--mem",
                "1 GB",
                "--shm",
                "x",
                "--rdma",
                "ib",
                "x.py",
            ],
            [
                "--image: 'a b' is not the name of an image",
                "--mem: '1 GB' is not a quantity, such as 64Gi",
                "--shm: 'x' is not a quantity, such as 64Gi",
                "--rdma: 'ib' is not PREFIX/NAME or PREFIX/NAME:N",
            ],
        ),
        (
            [
                "--kubernetes",
                "--image",
                "i",
                "--node-selector",
                "a",
                "--toleration",
                "a:No",
                "x.py",
            ],
            [
                "--node-selector: 'a' is not KEY=VALUE, as a label of a node",
                "--toleration: 'a:No' is not KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]",
            ],
        ),
        (
            ["--kubernetes", "--image", "i", "--efa", "--pvc", "a:b", "--env", "RANK=1", "x.py"],
            [
                "--efa: needs the number of adapters of a pod, as in --efa 4",
                "--pvc: 'a:b' is not NAME or NAME:/PATH",
                "--env RANK: the launch sets it in the pods",
            ],
        ),
        (
            ["--kubernetes", "--image", "i", "--queue", "A", "--api", "v2", "x.py"],
            ["--queue: 'A' is not a Kubernetes name", "--api: 'v2' is not one of job, jobset"],
        ),
        (
            ["--kubernetes", "--image", "i", "--join-timeout", "9", "x.py"],
            [
                "--join-timeout: the pods of a script run torchrun, which has no such flag\n"
                "  try: give --nnodes MIN: as well, with drumline in the image, or leave it out"
            ],
        ),
        (
            ["--kubernetes", "--print", "--name", "A_B", "--namespace", "n", "x.py"],
            [
                "3 problems",
                "--image: is missing",
                "--print: is not for --kubernetes",
                "--name: 'A_B' is not a Kubernetes name",
            ],
        ),
        (["--env-file", "e", "x.py", "--print"], ["there is no file x.py"]),
        (["--env-file", "e", "--print", "x.py"], ["e cannot be read: No such file"]),
        (["--procs", "0", "digits"], ["--procs"]),
        (
            ["--watch", "--hang-after", "9", "digits"],
            [
                "--watch: is for scripts; give --watch.on_hang after the name of the task",
                "--hang-after: is for scripts; give --watch.hang_s after the name of the task",
            ],
        ),
        (["--on-hang", "stop", "--print", "x.py"], ["--on-hang: needs --watch"]),
        (
            ["--watch", "--print", "x.py"],
            ["--print: shows torchrun alone, which does not watch a script; leave --watch out"],
        ),
        (["--watch", "--kubernetes", "--image", "i", "x.py"], ["--watch: is not for --kubernetes"]),
        (
            ["--watch", "--hang-after", "0", "--on-hang", "wait", "x.py"],
            ["--hang-after", "--on-hang"],
        ),
        (
            ["--profile", "9:12", "digits"],
            ["--profile: is for scripts; give --log.profile FIRST:LAST after the name of"],
        ),
        (
            ["--profile-to", "d", "--profile-only", "x.py"],
            ["--profile-to: needs --profile", "--profile-only: needs"],
        ),
        (
            ["--profile", "1:9", "x.py"],
            ["--profile: '1:9' is not FIRST:LAST, as in 10:20, with FIRST at least 2"],
        ),
        (["--profile", "9:12", "--print", "x.py"], ["--profile: is not for --print"]),
    ],
)
def test_what_is_wrong_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    messages: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    errors = capsys.readouterr().err
    for message in messages:
        assert message in errors
    assert "hunter2" not in errors


def test_under_a_launcher_it_does_not_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "a")
    assert main(["launch", "digits"]) == 2
    assert (
        "is run once, but a launcher has started this process as a rank" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "values", "rest"),
    [
        ("--procs 2 --print a.py --x", {"procs": 2, "print": True}, "a.py --x"),
        ("--procs=2 -- a.py -- b", {"procs": 2}, "a.py -- b"),
        ("--print false a.py", {"print": False}, "a.py"),
        ("--print skypilot a.py", {"print": "skypilot"}, "a.py"),
        ("--no-standby a.py", {"standby": False}, "a.py"),
        ("-h", {"help": True}, ""),
        ("--watch a.py --watch", {"watch": True}, "a.py --watch"),
    ],
)
def test_flags_of_the_launch_end_at_the_first_word(
    words: str, values: dict[str, object], rest: str
) -> None:
    flags = read_flags(words.split(), OWN_FLAGS, ends_at_name=True)
    assert not flags.layer.problems
    assert flags.values == values
    assert flags.positional == tuple(rest.split())


@pytest.mark.parametrize(
    ("target", "name"),
    [("examples/own_loop.py", "own-loop"), ("my.py:MyTask", "mytask"), ("digits", "digits")],
)
def test_a_job_is_named_after_what_it_runs(target: str, name: str) -> None:
    assert LaunchRequest(FlagValues(), target, []).name == name


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--hosts", "ignored:8"], "--hosts 'me@a,[fd00::1]'"),
        (["--hostfile", "my hosts"], "--hostfile '/code/my hosts'"),
        (
            ["--hosts", "a", "--ssh", "ssh -o 'User={me}'", "--python", "/venv/bin/python"],
            "--hosts 'me@a,[fd00::1]' --ssh 'ssh -o '\"'\"'User={me}'\"'\"'' --python /venv/bin/python",
        ),
    ],
)
def test_a_detached_job_is_followed_as_it_was_launched(
    words: list[str], printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every folder; the hosts are those on which it has started, which may be spares."""
    monkeypatch.setattr(Path, "absolute", lambda path: Path("/code", path))
    flags = read_flags(words, OWN_FLAGS, ends_at_name=True)
    request = LaunchRequest(flags.values, "digits", [])
    hosts = [Host("me@a", 8), Host("fd00::1")]
    command = follow_command(request.follow_words, "attach", "digits-1a2b3c", hosts)
    assert command == f"drumline attach digits-1a2b3c {printed}"
    verb, job, *options = shlex.split(command)[1:]
    flags, name = read_job_command(verb, [job, *options], {}, "", "")
    assert name == job


def test_help_has_every_flag_below_its_place_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["launch", "--help"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    begins = [line.split()[0] for line in printed.splitlines() if line.startswith("  --")]
    assert set(begins) == {f"--{name}" for name in OWN_FLAGS}
    # Of pods it is a number, of ParallelCluster a switch.
    assert [name for name, count in Counter(begins).items() if count > 1] == ["--efa"]
    assert (
        printed.index("\nSlurm ") < printed.index("  --partition") < printed.index("\nKubernetes ")
    )
    text = " ".join(printed.split())
    assert "[3 for a task, which resumes from its newest checkpoint; 0 for a script" in text
