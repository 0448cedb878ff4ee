"""The batch file for Slurm, what it may not contain, and srun's variables for a node."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.base.errors import ConfigError, UsageError
from drumline.cli import launch_command
from drumline.config import FlagValues
from drumline.launch.node_plan import NodePlan
from drumline.launch.slurm import (
    batch_text,
    check_sbatch,
    node_of_step,
    submit,
    write_batch_file,
    wrong_flag_words,
    wrong_values,
)

STEP = {
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "3",
    "SLURM_STEP_ID": "1",
}


def test_a_batch_file_has_all_that_was_asked_for() -> None:
    flags = FlagValues(
        {"nodes": 2, "gpus": 8, "partition": "long", "time": "1-0", "sbatch": "--exclusive"}
        | {"signal-before": 60}
    )
    command = ["python", "it's", "--x=$HOME"]
    lines = batch_text("mine", command, flags, num_cpus=4).splitlines()
    assert lines[0] == "#!/bin/sh"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=mine", "nodes=2", "ntasks-per-node=1", "partition=long", "time=1-0", "gpus-per-node=8",
        "cpus-per-task=4", "requeue", "signal=USR1@60", "output=mine-%j.log", "open-mode=append", "exclusive",
    ]  # fmt: skip
    (srun,) = [line for line in lines if line.startswith("srun ")]
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--cpus-per-task=4"]
    assert shlex.split(srun) == [*words, *command]


@pytest.mark.parametrize(
    ("code", "count", "requeue", "expected", "stderr"),
    [
        (0, "", 0, 0, ""),
        (1, "", 0, 1, ""),
        (75, "", 0, 75, "drumline: requeueing job 12 (1 of 3)\nrequeue 12\n"),
        (75, "2", 0, 75, "drumline: requeueing job 12 (3 of 3)\nrequeue 12\n"),
        (75, "3", 0, 75, "drumline: preempted after 3 requeues; --max-requeues is 3, so the job ends\n"),
        (
            75, "0", 1, 75,
            "drumline: requeueing job 12 (1 of 3)\nrequeue 12\n"
            "drumline: the requeue failed; rerun the same command to resume\n",
        ),
    ],
)  # fmt: skip
def test_only_a_preempted_run_is_requeued(
    tmp_path: Path, code: int, count: str, requeue: int, expected: int, stderr: str
) -> None:
    """The file as a shell runs it; Slurm's two commands are stand-ins here, and real in
    tests/multinode."""
    for name, text in (
        ("srun", f'[ "${{#DRUMLINE_SECRET}}" -eq 64 ] && exit {code}'),
        ("scontrol", f'echo "$@" >&2; exit {requeue}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text(batch_text("mine", ["true"], FlagValues({"max-requeues": 3})))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"} | (
        {"SLURM_RESTART_COUNT": count} if count else {}
    )
    done = subprocess.run(
        ["/bin/sh", tmp_path / "job"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (expected, stderr)


def test_what_cannot_be_in_a_batch_file_is_rejected() -> None:
    options = {"partition": "a\n#SBATCH --uid=0", "qos": "it's", "account": "fine", "time": "2"}
    assert list(wrong_values(options)) == [
        "--partition: 'a\\n#SBATCH --uid=0' cannot be in a batch file; no blanks, quotes and the like",
        '--qos: "it\'s" cannot be in a batch file; no blanks, quotes and the like',
    ]
    assert list(wrong_flag_words("srun-flags", "--exclusive -x '--comment=a b'")) == [
        "--srun-flags: '-x' is not a flag for a batch file; give --name or --name=value",
        "--srun-flags: '--comment=a b' is not a flag for a batch file; give --name or --name=value",
    ]


def srun_line(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return shlex.split(line)


@pytest.mark.parametrize(
    ("container", "flags"),
    [
        (
            "nvcr.io#nvidia/pytorch:25.01-py3",
            [
                "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
                "--container-mounts=$PWD:$PWD",
                "--container-workdir=$PWD",
            ],
        ),
        (
            "./train.sqsh",
            [
                "--container-image=./train.sqsh",
                "--container-mounts=$PWD:$PWD",
                "--container-workdir=$PWD",
            ],
        ),
        ("/images/train", ["--container=/images/train"]),
    ],
)
def test_ranks_in_a_container_have_the_python_of_the_container(
    container: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--slurm", "--print", "--srun-flags=--mpi=none", "--container", container, "digits"]
    assert launch_command.run(words) == 0
    start = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--mpi=none", *flags]
    command = [*start, "python3", "-m", "drumline", "launch", "--srun", "--", "digits"]
    assert srun_line(capsys.readouterr().out) == command


@pytest.mark.parametrize(
    ("flags", "cores"),
    [
        (["--procs", "8"], "8 cores"),
        (["--gpus", "1"], "1 core"),
        (["--procs", "8", "--cpus", "64"], None),
        (["--procs", "8", "--sbatch=--cpus-per-gpu=4"], None),
        ([], None),
    ],
)
def test_without_cpus_each_rank_has_a_core_and_a_note_says_so(
    flags: list[str], cores: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_command.run(["--slurm", "--print", *flags, "digits"]) == 0
    shown = capsys.readouterr()
    if cores is None:
        assert "note" not in shown.err
        return
    assert shown.err == (
        f"drumline: note: {cores} for each node, one for each rank; --cpus N gives more to workers that load data\n"
    )
    flag = f"--cpus-per-task={cores.split()[0]}"
    assert f"#SBATCH {flag}\n" in shown.out
    assert flag in srun_line(shown.out), "srun does not inherit it"


def test_the_lines_of_setup_are_sourced_by_bash_before_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The functions that modules and conda define are not in a plain sh."""
    monkeypatch.chdir(tmp_path)
    setup = tmp_path / "it's; exit 3.sh"
    setup.write_text("function module { export LOADED=$2; }\nmodule load cuda\n")
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "loaded $LOADED"\n')
    srun.chmod(0o755)
    words = ["--slurm", "--print", "--python", "/env/bin/python", "--setup", setup.name, "digits"]
    assert launch_command.run(words) == 0
    text = capsys.readouterr().out
    assert "/env/bin/python -m drumline launch --srun -- digits\n" in text
    batch = tmp_path / "job"
    batch.write_text(text)
    batch.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([batch], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "loaded cuda\n"), done.stderr
    setup.unlink()
    done = subprocess.run([batch], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"drumline: the file of --setup cannot be read: {setup}\n"


def test_a_file_of_the_users_own_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.sbatch"
    write_batch_file(path, batch_text("a", ["true"], FlagValues()))
    write_batch_file(path, batch_text("b", ["true"], FlagValues()))
    assert "--job-name=b" in path.read_text()
    path.write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match="exists, and was not written by drumline launch"):
        write_batch_file(path, "")
    with pytest.raises(
        UsageError, match=r"nowhere/mine\.sbatch cannot be written: No such file or directory"
    ):
        write_batch_file(tmp_path / "nowhere" / "mine.sbatch", "")


def test_without_sbatch_and_rejected_by_it(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=f"sbatch is not installed on {re.escape(os.uname().nodename)}"
    ):
        check_sbatch(str(tmp_path))
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    assert check_sbatch(str(tmp_path)) == str(sbatch)
    with pytest.raises(
        UsageError, match=r"job\.sbatch \(exit code 1\):\n  - sbatch: error: no such partition"
    ):
        submit(str(sbatch), Path("job.sbatch"))
    sbatch.write_text("#!/bin/sh\necho '7;cluster'\n")
    assert submit(str(sbatch), Path("job.sbatch")) == "7"


def test_print_shows_the_file_and_submits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [
        "--slurm",
        "--print",
        "--procs",
        "2",
        "--sbatch=--exclusive --nice",
        "digits",
        "--run",
        "a b",
    ]
    assert launch_command.run(command) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --exclusive\n#SBATCH --nice\n" in text
    assert (
        f"{shlex.quote(sys.executable)} -m drumline launch --srun --procs=2 -- digits --run 'a b'\n"
        in text
    )
    with pytest.raises(UsageError, match="sbatch is not installed"):
        launch_command.run(["--slurm", "digits"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            ["--slurm", "--sbatch='", "digits"],
            '--sbatch: "\'" cannot be parsed: No closing quotation',
        ),
        (
            ["--slurm", "--srun-flags=-n 9", "digits"],
            "--srun-flags: '-n' is not a flag for a batch file; give --name or --name=value",
        ),
        (
            ["--slurm", "--container", "a$(id)", "digits"],
            "--container: 'a$(id)' is not an image or a folder; no blanks, quotes and the like",
        ),
        (
            ["--slurm", "--setup", "none.sh", "digits"],
            "--setup: there is no file none.sh (looked in ",
        ),
        (["--setup", "none.sh", "digits"], "--setup: needs --slurm"),
        (["--python", "p", "digits"], "--python: needs --hosts or --hostfile"),
        (["--slurm", "--job-name", "a b", "digits"], "--job-name: 'a b' cannot be in a batch file"),
        (["--slurm", "--srun", "digits"], "--slurm and --srun exclude each other"),
        (["--partition", "a", "digits"], "--partition: needs --slurm"),
        (["--nodes", "2", "digits"], "--nodes: needs --kubernetes or --slurm"),
        (["--slurm", "--nnodes", "3:1", "digits"], "--nnodes: '3:1' is not understood"),
        (["--nnodes", "1:", "digits"], "--nnodes: is for a job on several nodes"),
        (["--master", "a", "digits"], "--master: needs --node-rank"),
        (["--node-rank", "0", "--nodes", "2", "digits"], "--master: a host's name is missing"),
        (
            ["--node-rank", "2", "--nodes", "2", "--master", "a", "digits"],
            "--node-rank: 2 must be between 0 and 1 (--nodes 2)",
        ),
        (
            ["--node-rank", "0", "--nodes", "2", "--master", "a:b", "digits"],
            "--master: 'b' is not a port",
        ),
        (
            ["--kubernetes", "--image", "i", "--keep-going", "digits"],
            "--keep-going: is not for --kubernetes",
        ),
        (["--srun", "--print", "digits"], "--print: is not for --srun"),
        (["--slurm", "digits", "--optim.lr", "x"], "--optim.lr"),
    ],
)
def test_wrong_flags_are_reported(command: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        launch_command.run(command)


def test_a_job_that_may_shrink_is_not_ended_for_a_lost_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        launch_command.run(["--slurm", "--print", "--nodes", "3", "--nnodes", "2:", "digits"]) == 0
    )
    text = capsys.readouterr().out
    assert "#SBATCH --no-kill\n" in text
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill " in text
    assert " --nnodes=2: -- digits\n" in text
    with pytest.raises(UsageError, match="--nnodes is 4:, but there are 3 in --nodes"):
        launch_command.run(["--slurm", "--print", "--nodes", "3", "--nnodes", "4:", "digits"])


def test_a_node_by_flags_is_what_a_file_would_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--print",
        "--nodes",
        "3",
        "--node-rank",
        "1",
        "--master",
        "gpu07:4000",
        "--procs",
        "2",
    ]
    assert launch_command.run([*words, "--nnodes", "2:", "--address", "10.0.0.8", "digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = lines[lines.index("# node 1 of 3, this one") + 1]
    for part in (
        "--nnodes 2:3 ",
        "--nproc-per-node 2 ",
        "--rdzv-endpoint gpu07:4000 ",
        "--local-addr 10.0.0.8 ",
    ):
        assert part in line
    assert launch_command.run(["--print", "--node-rank", "0", "--procs", "2", "digits"]) == 0
    assert "--rdzv-endpoint 127.0.0.1:0 " in capsys.readouterr().out, "one node meets nobody"


def test_a_node_of_a_step() -> None:
    node = NodePlan(
        num_nodes=2, node_rank=1, num_procs=4, endpoint="gpu07:20022", peers=("gpu07", "gpu08")
    )
    assert node_of_step(STEP, num_procs=4) == node
    first = node_of_step({**STEP, "SLURM_NODEID": "0"}, num_procs=4)
    assert (first.node_rank, first.known_address) == (0, "gpu07")
    alone = {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert node_of_step(alone, num_procs=None) == NodePlan(num_procs=None)
    with pytest.raises(
        UsageError,
        match=r"--srun: the step has 8 tasks on 2 nodes(.|\n)*srun --ntasks=\$SLURM_NNODES",
    ):
        node_of_step({**STEP, "SLURM_STEP_NUM_TASKS": "8"}, num_procs=4)
    with pytest.raises(
        UsageError, match="--srun: srun did not start this process: SLURM_NODEID, SLURM_STEP"
    ):
        node_of_step({}, num_procs=4)
