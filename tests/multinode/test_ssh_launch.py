"""`drumline launch --hosts` on real hosts: one command starts, shows and ends the whole job,
whatever happens to it."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.report.verify.run_check import verify_run
from tests.cli.test_keep_going import fill, num_starts
from tests.cli.test_preempt_command import pid_of_rank
from tests.multinode import needs, processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.sshd import SshDaemons

MakeTestbed = Callable[..., Testbed]
SUPERVISOR = f"{sys.executable} -m drumline.launch.ssh.supervisor "
MakeDesk = Callable[..., "Desk"]
ROOT = Path(__file__).parents[2]
# Ranks that do not load torch: that they are started, shown and ended is what is looked at.
TALK = """
import os, socket, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is on {socket.gethostname()} with {sys.argv[1:]}")
print(f"{os.environ['NOTE']} {len(os.environ['TOKEN'])} {os.environ.get('STAYS')}", file=sys.stderr)
Path(f"up-{rank}").touch()
if rank == 1:
    while len(list(Path().glob("up-*"))) < 4:
        time.sleep(0.05)
    sys.stdout.buffer.write(b"\\xff\\x00\\x07 bytes\\n" + b"long" * 50_000 + b"\\n")
    sys.stdout.flush()
    while not Path("seen").exists():
        time.sleep(0.05)
    sys.stdout.buffer.write((b"fast" * 25 + b"\\n") * 100_000 + b"no end")
    sys.stdout.flush()
    Path("said").touch()
    raise ValueError("this is the first")
while not Path("said").exists() or rank != 2:
    time.sleep(0.05)
time.sleep(0.3)
sys.exit(9)
"""
# Says when it is up and when it is asked to end, which rank 1 does not heed; has a child in a
# session of its own.
SLEEP = """
import os, signal, subprocess, time
rank = os.environ["RANK"]
def leave(*_):
    print(f"rank {rank} saves", flush=True)
    if rank != "1":
        os._exit(75)
signal.signal(signal.SIGTERM, leave)
subprocess.Popen(["setsid", "sleep", "1000"])
print(f"rank {rank} is up as {os.environ['DRUMLINE_JOB']}", flush=True)
while True:
    time.sleep(1)
"""


class Desk:
    """Where the user sits: the first host, from which ssh leads to all."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.ssh = SshDaemons(bed)

    def launch(self, *words: str, env: dict[str, str] | None = None) -> Job:
        ssh = {"DRUMLINE_SSH": f"ssh -F {self.ssh.config}"}
        return self.bed.hosts[0].start(
            *(self.bed.hosts[0].python, "-m", "drumline", "launch", *words),
            env={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", **ssh, **(env or {})},
            cwd=self.folder,
        )

    def sleepers(self, *words: str) -> tuple[Job, str]:
        """A job that runs forever, started on all its ranks; and its marker."""
        (self.folder / "sleep.py").write_text(SLEEP)
        hosts = ",".join(host.name for host in self.bed)
        job = self.launch("--hosts", hosts, "--procs", "1", *words, "sleep.py")
        for rank in range(len(self.bed.hosts)):
            job.wait_for(f"rank {rank} is up as ")
        (name,) = set(re.findall(r" is up as (\w+)", job.text()))
        for host in self.bed:
            assert len(host.find(f"DRUMLINE_JOB={name}")) >= 3, "the agent, the rank and its child"
        return job, f"DRUMLINE_JOB={name}"

    def wait_for_none(self, marker: str, *hosts: Host) -> None:
        for host in hosts or self.bed.hosts:
            processes.wait_until(
                lambda host=host: not host.find(marker), f"no {marker} on {host}", timeout_s=40
            )


@pytest.fixture(name="make_desk")
def _make_desk(make_testbed: MakeTestbed, tmp_path: Path) -> Callable[..., Desk]:
    def make(*names: str, warm: bool = False) -> Desk:
        folder = tmp_path / "mine" / "a folder"
        folder.mkdir(parents=True)
        return Desk(make_testbed(*names, warm=warm), folder)

    return make


@pytest.mark.soak
def test_all_ranks_are_on_one_screen_and_the_first_failure_is_reported_last(
    make_desk: MakeDesk,
) -> None:
    desk = make_desk("a", "b", "c")
    (desk.folder / "talk.py").write_text(TALK)
    (desk.folder / "hosts").write_text("a\nb\nroot@c slots=2\n")
    job = desk.launch(
        *(
            "--hostfile",
            "hosts",
            "--procs",
            "1",
            "--env",
            "TOKEN",
            "--env",
            "NOTE=a note",
            "--grace",
            "2",
        ),
        *("talk.py", "x y"),
        env={"TOKEN": "hunter2", "STAYS": "here"},
    )
    job.wait_for("is on c")
    job.wait_for("[b 1] long")  # what comes before the flood is not drowned in it
    (desk.folder / "seen").touch()
    assert not any(
        "hunter2" in processes.command(pid) for host in desk.bed for pid in host.space.pids()
    )
    code = job.wait()
    text = job.text()
    assert code == 1, text[-3000:]
    for rank, host in enumerate("abcc"):
        assert f"[{host} {rank}] rank {rank} of 4 is on {host} with ['x y']\n" in text
        assert f"[{host} {rank}] a note 7 None\n" in text
    assert f"[b 1] {chr(0xFFFD)}\\x00\\x07 bytes\n" in text
    assert f"[b 1] {'long' * 1000} ...\n" in text
    assert f"[b 1] {'fast' * 25}\n" in text
    assert "[b 1] no end\n" in text
    (logs,) = (desk.folder / "runs" / "launch").iterdir()
    assert f"drumline: 3 hosts; logs in runs/launch/{logs.name} on each\n" in text
    whole = (logs / "rank-00001.out").read_bytes()
    assert whole.count(b"fast" * 25 + b"\n") == 100_000
    assert whole.endswith(b"no end")
    assert "bytes are not shown; see" in text
    last = text[text.rindex("drumline: rank") :].splitlines()
    assert last[:2] == [
        "drumline: rank 1 on b (exit code 1) failed first: ValueError: this is the first",
        "  try: read the lines above that begin with [b 1]",
    ]
    assert text.count("[b 1] Traceback (most recent call last):\n") == 1
    assert text.count("ValueError: this is the first") == 2, (
        "its traceback, and the line that names the rank"
    )
    assert last[-2] in (
        "drumline: the others: rank 2 on c (exit code 9) failed after it; 2 ranks were stopped",
        # on a busy machine rank 2 is stopped before it fails
        "drumline: the others: 3 ranks were stopped",
    )
    assert last[-1] == f"drumline: logs in runs/launch/{logs.name} on each host"
    assert "hunter2" not in text + "".join(
        path.read_text(errors="replace") for path in logs.iterdir()
    )


@pytest.mark.soak
def test_no_rank_outlives_the_controller_and_the_supervisor(make_desk: MakeDesk) -> None:
    desk = make_desk("a", "b")
    job, marker = desk.sleepers("--grace", "2")
    job.send(signal.SIGTERM)
    assert job.wait() == 130
    assert "[a 0] rank 0 saves" in job.text()
    assert "drumline: interrupted; all ranks were stopped\n" in job.text()
    assert not any(host.find(marker) for host in desk.bed), (
        "also the one that does not heed SIGTERM"
    )

    # Both at once: on b nobody but the supervisor is left to end the job, and on a, where the nodes
    # met, not even that.
    job, marker = desk.sleepers("--grace", "2")
    (supervisor,) = [
        pid for pid in desk.bed["a"].space.pids() if processes.command(pid) == SUPERVISOR
    ]
    processes.send([supervisor], signal.SIGKILL)
    job.send(signal.SIGKILL)
    desk.wait_for_none(marker)
    logs = max((desk.folder / "runs" / "launch").iterdir())
    for rank in range(2):
        assert f"rank {rank} saves" in (logs / f"rank-0000{rank}.out").read_text()


@pytest.mark.soak
def test_a_host_that_cannot_take_part_is_named_with_what_to_do(
    make_desk: MakeDesk, tmp_path: Path
) -> None:
    desk = make_desk("a", "b")
    (desk.folder / "sleep.py").write_text(SLEEP)
    unknown = desk.launch("--hosts", "a,nowhere", "--procs", "1", "sleep.py")
    taken = desk.launch("--hosts", "a,b", "--procs", "1", "--port", "22", "sleep.py")
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    without_key = tmp_path / "config"
    without_key.write_text(
        re.sub("IdentityFile .*", "IdentityFile none", desk.ssh.config.read_text())
    )
    cases = [
        (["--python", "/no/python"], "b: there is no Python at /no/python (env: "),
        (["--python", str(bare)], f"b: {bare} cannot import drumline there ("),
        (
            ["--ssh", f"ssh -F {without_key}"],
            "b: it rejected the ssh key (root@b: Permission denied",
        ),
        (["--ssh", "/no/ssh"], "/no/ssh cannot be started: No such file or directory"),
        (["--logs", "/proc/logs"], "b: the log folder /proc/logs cannot be made: "),
    ]
    jobs = [desk.launch("--hosts", "b", "--procs", "1", *words, "sleep.py") for words, _ in cases]
    for job, (_, message) in zip(jobs, cases, strict=True):
        assert job.wait() == 3
        assert f"drumline: error: {message}" in job.text()
        assert "\n  try: " in job.text()
    assert [unknown.wait(), taken.wait()] == [3, 3], unknown.text() + taken.text()
    assert (
        "error: nowhere: its name does not resolve here (ssh: Could not resolve hostname nowhere"
        in unknown.text()
    )
    assert not desk.bed["a"].find("RANK=0"), "the others are ended"
    last = taken.text()[taken.text().rindex("drumline: the job failed on a (exit code 3):\n") :]
    assert "\n  drumline: error: the rendezvous port 22 of a is in use\n" in last, "sshd has it"
    # The folder of the code is this machine's own, as far as b knows.
    desk.bed["b"].run("mount", "-t", "tmpfs", "tmpfs", str(desk.folder))
    job = desk.launch("--hosts", "b", "--procs", "1", "sleep.py")
    assert job.wait() == 3
    assert (
        f"error: b: there is no file sleep.py in {desk.folder}\n  try: copy the code there, or add --sync"
        in job.text()
    )
    desk.bed["b"].run("mount", "-t", "tmpfs", "tmpfs", str(desk.folder.parent))
    job = desk.launch("--hosts", "b", "--procs", "1", "sleep.py")
    assert job.wait() == 3
    assert f"error: b: the folder {desk.folder} does not exist there (env: " in job.text()


MINE = """
from drumline.training.tasks import ImageClassification
from part.one import WORD

class Mine(ImageClassification):
    has_said = False
    defaults = {"data.name": "digits", "model.widths": [8], "train.steps": 1_000_000, "train.batch_size": 32}

    def loss(self, model, batch):
        if not self.has_said:
            print(f"the code is {WORD}")
        self.has_said = True
        return super().loss(model, batch)
"""


def test_a_task_trains_with_code_that_is_copied_first_and_the_same_everywhere(
    make_desk: MakeDesk, tmp_path: Path
) -> None:
    desk = make_desk("a", "b")
    b = desk.bed["b"]
    folder = desk.folder
    b.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    (folder / "part").mkdir()
    (folder / "part" / "one.py").write_text("WORD = 'fresh'\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "note.txt").write_text("not code")
    words = (
        "--sync",
        "--exclude",
        "*.txt",
        "--hosts",
        "a,b",
        "--procs",
        "1",
        "--env",
        "OMP_NUM_THREADS=1",
    )
    words = (*words, "mine.py:Mine", "--run", "runs/here")
    job = desk.launch(*words)
    job.wait_for("step  ", timeout_s=150)
    job.send(signal.SIGTERM)
    assert job.wait(60) == 75, job.text()
    assert (
        "drumline: preempted by SIGTERM; the ranks have saved: rerun the same command to resume\n"
        in job.text()
    )
    assert (
        json.loads((folder / "runs" / "here" / "preempted.json").read_text())["signal"] == "SIGTERM"
    )
    assert "drumline: the code is the same on all hosts\n" in job.text()
    names = set(b.run("ls", str(folder)).stdout.split())
    assert names - {"__pycache__"} == {"mine.py", "part", "runs"}, (
        "what is excluded is not there; its logs are"
    )
    assert "[a 0] mine.py:Mine on 2 ranks (cpu, gloo)\n" in job.text()
    assert "[b 1] the code is fresh\n" in job.text(), (
        "what other ranks write to the run folder is shown"
    )
    ranks = json.loads((folder / "runs" / "here" / "environment.json").read_text())["ranks"]
    assert [(entry["rank"], entry["host"]) for entry in ranks] == [(0, "a"), (1, "b")]

    fake = tmp_path / "rsync"
    # As a shell says it that finds no rsync; /usr/bin cannot be taken away from a host.
    fake.write_text("#!/bin/sh\necho 'sh: 1: rsync: not found' >&2\nexit 127\n")
    fake.chmod(0o755)
    assert b.run("mount", "--bind", str(fake), needs.tool("rsync")).returncode == 0
    job = desk.launch(*words)
    assert job.wait() == 3
    assert (
        "error: b: rsync is not installed there\n  try: install rsync (apt-get install rsync)"
        in job.text()
    )


RAISES = """
import os
from drumline.training.tasks import ImageClassification

class Raises(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.steps": 50, "train.batch_size": 64}
    seen = 0

    def loss(self, model, batch):
        self.seen += 1
        if self.seen == 4 and os.environ["RANK"] == "1":
            raise ValueError("label 7 of 3 classes")
        return super().loss(model, batch)
"""


@pytest.mark.soak
def test_a_rank_that_raises_is_reported_once_and_named_at_the_end(make_desk: MakeDesk) -> None:
    desk = make_desk("a", "b", warm=True)
    (desk.folder / "mine.py").write_text(RAISES)
    job = desk.launch(
        *(
            "--hosts",
            "a,b",
            "--procs",
            "1",
            "--env",
            "OMP_NUM_THREADS=1",
            "mine.py:Raises",
            "--run",
            "run",
        )
    )
    code = job.wait(120)
    text = job.text()
    assert code == 1, text
    assert "restarting the ranks" not in text, "it would raise at the same step"
    assert text.count("Traceback (most recent call last)") == 1, text
    report = (
        "[b 1] drumline: error: rank 1 on b crashed at step 3: ValueError: label 7 of 3 classes\n"
    )
    assert text.count(report) == 1, text
    closing = "drumline: rank 1 on b (exit code 1) failed first: ValueError: label 7 of 3 classes\n"
    assert text.count(closing) == 1, text
    assert text.index(report) < text.index(closing)
    assert "stopped because" not in text


@pytest.mark.soak
def test_the_others_continue_without_a_host_that_loses_its_power_until_it_is_back(
    make_desk: MakeDesk,
) -> None:
    desk = make_desk("a", "b", "c", warm=True)
    run = desk.folder / "run"
    run.mkdir()
    for name in ("hold-0-13", "hold-1-13", "hold-2-13", "hold-0-22", "hold-2-22"):
        (run / name).touch()

    def wait_until_held(*names: str) -> None:
        for name in names:
            reached = run / f"{name}-reached"
            processes.wait_until(
                lambda reached=reached: reached.exists(), f"{reached}\n{job.text()}", timeout_s=200
            )

    job = desk.launch(
        *(
            "--hosts",
            "a,b,c",
            "--procs",
            "1",
            "--env",
            "GLOO_SOCKET_IFNAME=eth0",
            f"{ROOT}/tests/live_jobs.py:Held",
        ),
        *("--run", str(run), "--train.steps", "400", "--dist.on_lost_node", "continue"),
    )
    wait_until_held("hold-0-13", "hold-1-13", "hold-2-13")
    pids = {rank: (run / f"pid-{rank}").read_text() for rank in (0, 2)}
    desk.bed["b"].power_off()
    for rank in range(3):
        (run / f"hold-{rank}-13").unlink()
    job.wait_for("node 1 (b) was lost by step 15; the others continue (paused ", timeout_s=150)
    job.wait_for("the job continues with a, c", timeout_s=150)
    wait_until_held("hold-0-22", "hold-2-22")
    job.wait_for("[c 1] node 2 trains as rank 1\n", timeout_s=60)
    desk.bed["b"].power_on()
    desk.ssh.serve(desk.bed["b"])
    job.wait_for("b answers again; its ranks join the others", timeout_s=150)
    job.wait_for("node 1 waits to join node 0 (a)", timeout_s=150)
    for rank in (0, 2):
        (run / f"hold-{rank}-22").unlink()
    job.wait_for("node 1 (b) joined after step ", timeout_s=150)
    job.wait_for("[c 2] node 2 trains as rank 2\n", timeout_s=60)
    assert job.wait(150) == 0, job.text()
    assert {rank: (run / f"pid-{rank}").read_text() for rank in (0, 2)} == pids, (
        "in the same processes"
    )
    assert verify_run(run, lambda *_: None).problems == []


@pytest.mark.soak
def test_a_job_on_hosts_keeps_going_after_a_preemption_and_a_full_disk(
    make_desk: MakeDesk, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk("size=24m")
    run = disk / "run"
    desk = make_desk("a", "b")  # a warm agent would not survive the signal at the end
    job = desk.launch(
        *(
            "--hosts",
            "a,b",
            "--procs",
            "1",
            "--env",
            "GLOO_SOCKET_IFNAME=eth0",
            "--keep-going",
            "digits",
        ),
        *(
            "--run",
            str(run),
            "--model.widths",
            "8",
            "--train.epochs",
            "5000",
            "--log.every_steps",
            "1",
        ),
        *("--checkpoint.every_steps", "20"),
    )

    def wait_for_start(number: int) -> None:
        processes.wait_until(
            lambda: num_starts(run) == number and pid_of_rank(run, 1) is not None,
            f"start {number}",
            timeout_s=150,
        )

    wait_for_start(1)
    desk.bed["b"].start("kill", "-TERM", str(pid_of_rank(run, 1))).wait()
    wait_for_start(2)

    filler = fill(disk)
    job.wait_for(" is full; the run resumes when ", timeout_s=150)
    filler.unlink()
    wait_for_start(3)

    job.send(signal.SIGTERM)
    assert job.wait(150) == 75, job.text()
    assert num_starts(run) == 3
    assert "restarting all ranks" not in job.text(), "neither is a restart of the launch"
