"""A detached job on one node: its folder, what starts its keeper, and when there is another
attempt."""

from __future__ import annotations

import errno
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.processes import send_signal
from drumline.launch.detached import host_service, job_folder, units
from drumline.launch.detached.job_folder import (
    ENDED,
    RUNNING,
    WAITING,
    JobFolder,
    JobSpec,
    JobState,
    folders_of,
    jobs_folder,
    remove_old,
    wrong_job_name,
)
from drumline.launch.detached.keeper import Attempt, Keeper, main
from drumline.launch.node_plan import NodePlan, Program


def make_spec(folder: Path, **fields: Any) -> JobSpec:
    frame = {
        "grace_s": 2.0,
        "logs": "logs",
        "environment": {},
        "secret": "s" * 64,
    }
    program = Program(("train", "digits"), is_task=True)
    node = NodePlan(num_nodes=2, max_restarts=3, join_timeout_s=1)
    frame |= {"program": asdict(program), "node": asdict(node)}
    spec = JobSpec(
        name="digits-1a2b3c",
        machine=socket.gethostname(),
        hosts=("a", "b"),
        launched_at=1.0,
        cwd=str(folder),
        keep_going=True,
        node=node,
        program=program,
        frame=frame,
        variables={"PATH": "/bin"},
    )
    return replace(spec, **fields)


def make_folder(folder: Path, **fields: Any) -> JobFolder:
    spec = make_spec(folder, **fields)
    job = JobFolder(folder / "jobs" / spec.name / "node-0")
    job.create(spec)
    return job


@pytest.mark.parametrize("name", ["digits-1a2b3c", "a", "7" * 80])
def test_names_of_jobs(name: str) -> None:
    assert wrong_job_name(name) is None


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "../x", "-a", "a b", "a;b", "a\n", "A", "é", "%h", "a" * 81]
)
def test_what_is_no_name_of_a_job(name: str) -> None:
    assert (
        wrong_job_name(name) == f"{name!r} is not a job's name (letters a to z, digits and dashes)"
    )


def test_the_state_folder_is_this_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    default = Path("/home/me/.local/state/drumline/jobs")
    assert jobs_folder({}) == default
    assert jobs_folder({"XDG_STATE_HOME": "relative"}) == default
    assert jobs_folder({"XDG_STATE_HOME": "/state"}) == Path("/state/drumline/jobs")


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = make_folder(tmp_path)
    assert json.dumps(asdict(job.spec())) == json.dumps(asdict(make_spec(tmp_path)))
    assert job.state() == JobState()
    assert job.path.stat().st_mode & 0o777 == 0o700
    assert (job.path / "spec.json").stat().st_mode & 0o777 == 0o600
    assert [folder.path for folder in folders_of(tmp_path / "jobs")] == [job.path]
    with pytest.raises(FileExistsError):
        make_folder(tmp_path)

    with job.held() as is_free, job.held() as is_free_again:
        assert (is_free, is_free_again) == (True, False)
        assert job.has_keeper()
        assert job.has_keeper(), "asking holds nothing"
    assert not job.has_keeper()


def test_a_disk_without_locks_keeps_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(lock: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    job = make_folder(tmp_path)
    monkeypatch.setattr("fcntl.flock", flock)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="No locks available"):
        job.has_keeper()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_machine_with_a_new_name_keeps_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "machine-id"
    file.write_text("1234\n")
    monkeypatch.setattr(job_folder, "MACHINE_ID", file)
    jobs = tmp_path / "jobs"
    here = make_folder(tmp_path, machine="before", machine_id="1234")
    assert [folder.path for folder in folders_of(jobs)] == [here.path]
    file.write_text("5678\n")
    assert folders_of(jobs) == [], "another machine has its name"
    file.unlink()
    assert folders_of(jobs) == [], "then the name counts"
    monkeypatch.setattr(socket, "gethostname", lambda: "before")
    assert [folder.path for folder in folders_of(jobs)] == [here.path]
    monkeypatch.setattr(job_folder, "MACHINE_ID", Path("/proc/sys/kernel/random/boot_id"))
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    assert job_folder.machine_id() == "", "an id of /run changes with each start"


def test_a_folder_of_another_machine_is_left_alone(tmp_path: Path) -> None:
    job = make_folder(tmp_path, machine="elsewhere")
    assert folders_of(tmp_path / "jobs") == []
    assert main(str(job.path)) == 0
    assert job.state() == JobState()


def test_words_of_a_unit_are_read_as_they_are() -> None:
    words = ["/a b/python", "100%h", "$HOME", 'a"b', "c\\d"]
    assert units.quoted(words) == r'"/a b/python" "100%%h" "$$HOME" "a\"b" "c\\d"'


def test_a_keeper_gets_the_environment_of_the_login_without_the_session() -> None:
    environment = {"PATH": "/bin", "SSH_AUTH_SOCK": "x", "XDG_SESSION_ID": "1", "HOME": "/root"}
    assert units.lasting_variables(environment) == {"PATH": "/bin", "HOME": "/root"}


@pytest.fixture(name="tools")
def _tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in PATH: there is no systemctl."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "setsid").symlink_to("/usr/bin/setsid")
    monkeypatch.setenv("PATH", str(tools))
    return tools


def test_what_is_missing_for_a_reboot_is_said(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_folder(tmp_path, machine="elsewhere")
    user = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(units, "LINGERING", tmp_path)

    def reason() -> str:
        notice = units.start_keeper(job, grace_s=1.0)
        begin = f"after a reboot of {socket.gethostname()} the job does not start again: "
        assert notice.startswith(begin)
        return notice.removeprefix(begin)

    assert reason() == "it has no systemd; launch the job again after a reboot"
    systemctl = tools / "systemctl"
    systemctl.symlink_to("/bin/true")
    assert reason() == (
        "without a login no user manager of systemd runs there; to change that for later jobs, "
        f"run `loginctl enable-linger {user}` there, with sudo if it is refused"
    )
    (tmp_path / user).touch()
    systemctl.unlink()
    systemctl.symlink_to("/bin/false")
    assert reason() == (
        "`systemctl --user` does not answer there; to change that for later jobs, "
        f"check the service user@{os.geteuid()} there"
    )


@pytest.mark.parametrize(
    ("uid", "is_on", "only", "excluded", "group", "ends"),
    [
        (1234, "true", "as 0", "as 0", "session-3.scope", True),
        (1234, "true", "as 0", 'as 1 "nobody"', "session-3.scope", True),
        (1234, "false", 'as 1 "me"', "as 0", "session-3.scope", True),
        (0, "true", "as 0", 'as 1 "nobody"', "session-3.scope", True),
        (1234, "false", "as 0", "as 0", "session-3.scope", False),
        (1234, "true", 'as 1 "nobody"', "as 0", "session-3.scope", False),
        (1234, "true", "as 0", 'as 2 "nobody" "me"', "session-3.scope", False),
        (0, "true", "as 0", "as 0", "session-3.scope", False),
        (1234, "true", "as 0", "as 0", "user@1234.service", False),
    ],
)
def test_a_login_that_ends_all_its_processes_starts_no_job(
    tmp_path: Path,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    is_on: str,
    only: str,
    excluded: str,
    group: str,
    ends: bool,
) -> None:
    """As logind decides it (manager_shall_kill of systemd)."""
    busctl = tools / "busctl"
    busctl.write_text(f"#!/bin/sh\necho b {is_on}; echo '{only}'; echo '{excluded}'\n")
    busctl.chmod(0o755)
    group_file = tmp_path / "cgroup"
    group_file.write_text(f"0::/user.slice/{group}\n")
    monkeypatch.setattr(units, "OWN_GROUP", group_file)
    job = make_folder(tmp_path, machine="elsewhere")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(units, "_user", lambda: "me")
    monkeypatch.setattr(units, "open_append", lambda path: path.open("ab"))
    if not ends:
        notice = units.start_keeper(job, grace_s=1.0)
        assert notice.startswith("after a reboot of ")
        return
    with pytest.raises(DrumlineError) as raised:
        units.start_keeper(job, grace_s=1.0)
    assert raised.value.lines() == [
        "the job would end with this login: logind.conf has KillUserProcesses=yes there",
        "try: run `loginctl enable-linger me` there, with sudo if it is refused; then launch again",
    ]
    assert not job.log.exists(), "nothing was started"


# When there is another attempt


class Ended:
    """A keeper whose attempt has ended."""

    def __init__(self, folder: Path, code: int, **fields: Any) -> None:
        self.keeper = Keeper(make_folder(folder, **fields))
        self.attempt = Attempt(self.keeper)
        self.attempt.send("started", ranks=[0], world_size=2, start=0, restarts_left=3)
        self.code = code

    def why_again(self, *, lost_first_node: bool = False) -> str:
        self.attempt.send("ended", code=self.code, last_lines=["last"], end_reason="")
        supervisor: Any = SimpleNamespace(lost_first_node=lost_first_node)
        return self.keeper._why_again(self.attempt, supervisor)

    def fail(self, code: int, *, restarts_left: int = 3, full_disk: str = "") -> None:
        self.attempt.send(
            "failed", rank=0, code=code, restarts_left=restarts_left, full_disk=full_disk
        )

    def assert_ended(self, code: int) -> None:
        assert self.keeper.state.state == ENDED
        assert self.keeper.state.code == code
        assert f'"code":{code}' in self.keeper.folder.frames.read_text().splitlines()[-1]


def test_a_job_that_is_done_has_ended(tmp_path: Path) -> None:
    ended = Ended(tmp_path, 0)
    assert ended.why_again() == ""
    ended.assert_ended(0)
    spec_file = ended.keeper.folder.path / "spec.json"
    assert "s" * 64 not in spec_file.read_text(), "nobody needs its secret any more"
    assert ended.keeper.folder.spec().variables == {}


def test_a_script_that_a_shutdown_ended_starts_again_only_as_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_by_signal(keeper: Keeper) -> tuple[Attempt, Any]:
        keeper.update(state=RUNNING)
        attempt = Attempt(keeper)
        attempt.code = -15
        return attempt, SimpleNamespace(end_reason="ended by SIGTERM")

    monkeypatch.setattr(Keeper, "_run_attempt", end_by_signal)
    monkeypatch.setattr(Keeper, "_wrong_folder", lambda _: "")
    node = NodePlan(num_nodes=2, max_restarts=0, join_timeout_s=1)
    program = Program(("train.py",), is_task=False)
    job = make_folder(tmp_path, program=program, node=node)
    assert Keeper(job).run() == 1, "the system starts it again"
    assert Keeper(job).run() == 0
    assert job.state().state == ENDED
    assert job.state().why == "its keeper or this machine was restarted, and no restart is left"


def test_a_rank_that_failed_for_good_ends_the_job(tmp_path: Path) -> None:
    ended = Ended(tmp_path, 1)
    ended.fail(1, restarts_left=0)
    assert ended.why_again() == ""
    ended.assert_ended(1)


def test_a_lost_first_node_counts_as_a_restart(tmp_path: Path) -> None:
    ended = Ended(tmp_path, 1)
    for number in (1, 2, 3):
        why = f"the first node is lost; restarting (restart {number} of 3)"
        assert ended.why_again(lost_first_node=True) == why
    assert ended.why_again(lost_first_node=True) == ""
    ended.assert_ended(1)
    assert ended.keeper.state.why == "the first node is lost, and no restart is left"


def test_lines_are_copied_as_objects_where_the_log_is_json(tmp_path: Path) -> None:
    frame = make_spec(tmp_path).frame
    (tmp_path / "logs").mkdir()
    ended = Ended(tmp_path, -9, frame={**frame, "is_json": True})
    assert ended.attempt.has_room()
    ended.attempt.send("lines", rank=1, stream="out", lines=["hello", '{"loss": 2, "host": "x"}'])
    ended.keeper._say(f"warning: {ended.why_again()}")
    lines = (tmp_path / "logs/node-0.jsonl").read_text().splitlines()
    objects = list(map(json.loads, lines))
    host = socket.gethostname()
    assert [item["host"] for item in objects] == [host] * 3
    assert (objects[0]["message"], objects[0]["rank"]) == ("hello", 1)
    assert (objects[1]["loss"], objects[1]["rank"]) == (2, 1)
    assert objects[2]["level"] == "warning"
    assert objects[2]["message"].endswith("restarting (restart 1 of 3)")
    assert "rank" not in objects[2]

    (tmp_path / "plain" / "logs").mkdir(parents=True)
    plain = Ended(tmp_path / "plain", 0)
    assert not plain.attempt.has_room()
    plain.attempt.send("lines", rank=1, stream="out", lines=["hello"])
    assert not list((tmp_path / "plain" / "logs").iterdir())


def test_progress_gives_all_restarts_back(tmp_path: Path) -> None:
    ended = Ended(tmp_path, -9)
    assert ended.why_again().endswith("(restart 1 of 3)")
    assert ended.why_again().endswith("(restart 2 of 3)")
    ended.attempt.send("progress", reached_step=7, counted_step=3)
    assert ended.why_again() == (
        "the agent of this node was ended by a signal; restarting (restart 1 of 3)"
    )


def test_a_hang_that_is_to_stop_the_job_stops_it(tmp_path: Path) -> None:
    ended = Ended(tmp_path, -9)
    ended.attempt.send("diagnosis", action="stop")
    assert ended.why_again() == ""
    ended.assert_ended(1)


def test_a_preemption_is_followed_by_another_attempt(tmp_path: Path) -> None:
    ended = Ended(tmp_path / "goes-on", 75)
    assert ended.why_again() == "preempted by a signal or a notice to a rank, and saved; resuming"
    assert ended.keeper.state.restarts_left == 3, "it is no restart"
    ended = Ended(tmp_path / "ends", 75, keep_going=False)
    assert ended.why_again() == ""
    ended.assert_ended(75)


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    ended = Ended(tmp_path, 1)
    ended.fail(1, restarts_left=0, full_disk=str(tmp_path))
    assert ended.why_again() == "there is space again; resuming"
    assert ended.keeper.state.state == WAITING
    assert f"the disk of {tmp_path}" in ended.keeper.folder.frames.read_text()


def ask_to_stop(keeper: Keeper, *, save: bool) -> None:
    keeper._stop_by_signal(signal.SIGUSR2 if save else signal.SIGUSR1, None)


@pytest.mark.parametrize(
    ("save", "has_saved", "code", "ends_with"),
    [
        (True, True, 75, 75),
        (True, False, 75, 130),  # no rank was running
        (True, False, 1, 130),
        (False, True, 75, 130),
        (False, False, 0, 0),
    ],
)
def test_a_job_that_is_stopped(
    tmp_path: Path, save: bool, has_saved: bool, code: int, ends_with: int
) -> None:
    ended = Ended(tmp_path, code)
    ask_to_stop(ended.keeper, save=save)
    if has_saved:
        ended.attempt.send("saved")
    assert ended.why_again() == ""
    ended.assert_ended(ends_with)
    assert ended.keeper.folder.state().stops_with_save is save, "a reboot does not change it"


def test_a_job_that_is_stopped_between_two_starts_has_not_saved(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, cwd=str(tmp_path / "unmounted"))
    folder.write_state(JobState(stops_with_save=True))  # and the machine was restarted
    assert Keeper(folder).run() == 0
    assert folder.state().code == ExitCode.INTERRUPTED
    # Preempted, and in the pause before the next attempt.
    ended = Ended(tmp_path / "preempted", 75)
    ended.attempt.send("saved")
    ended.why_again()
    ask_to_stop(ended.keeper, save=True)
    assert not ended.keeper._can_begin(1.0)
    ended.assert_ended(75)


def test_without_its_folder_a_job_waits_and_ends(tmp_path: Path) -> None:
    missing = tmp_path / "unmounted"
    folder = make_folder(tmp_path, cwd=str(missing))
    assert Keeper(folder).run() == 0
    state = folder.state()
    assert (state.state, state.code) == (ENDED, ExitCode.PREFLIGHT_FAILED)
    assert state.why == f"the folder {missing} cannot be used: No such file or directory"


def test_a_damaged_spec_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    spec = folder.path / "spec.json"
    for text in ("", "[]", "{", '{"name": 7}', "[" * 10_000):
        spec.write_text(text)
        with pytest.raises(ValueError, match=r"\S"):
            folder.spec()
        assert folders_of(tmp_path / "jobs") == []


def test_a_job_that_is_being_launched_is_not_named_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    listed: list[JobFolder] = []
    write = JobFolder._write

    def write_and_list(job: JobFolder, path: Path, content: JobSpec | JobState) -> None:
        listed.extend(folders_of(tmp_path / "jobs", problems=problems))
        write(job, path, content)

    monkeypatch.setattr(JobFolder, "_write", write_and_list)
    make_folder(tmp_path)
    assert (problems, listed) == ([], [])
    assert len(folders_of(tmp_path / "jobs", problems=problems)) == 1


def test_a_keeper_that_cannot_start_says_why() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drumline.launch.detached.keeper", "/nowhere/jobs/x/node-0"],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "No such file or directory: '/nowhere/jobs/x/node-0'" in done.stderr


def test_a_keeper_whose_state_is_damaged_is_not_started_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_folder(tmp_path)
    (job.path / "state.json").write_text("{")
    assert main(str(job.path)) == 0
    assert f"{job.path} cannot be read: " in capsys.readouterr().err


def test_the_unit_of_a_job_that_was_deleted_is_removed(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    job = make_folder(tmp_path)
    unit = tmp_path / "config/systemd/user" / f"{job.unit}.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    job.remove()
    assert main(str(job.path)) == 0, "the system does not start it again"
    assert not unit.exists()


def test_an_agent_that_is_ended_while_it_exits_is_not_restarted(tmp_path: Path) -> None:
    ended = Ended(tmp_path, -15)
    ended.fail(1, restarts_left=0)
    assert ended.why_again() == ""
    ended.assert_ended(1)


def test_a_word_of_a_unit_stays_on_its_line() -> None:
    assert units.quoted(["/mine\nExecStartPre=/bin/false"]) == r'"/mine\nExecStartPre=/bin/false"'


def test_jobs_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    long_ago = time.time() - 40 * 86400

    def make_old(name: str, state: str, ended_at: float) -> None:
        folder = make_folder(tmp_path, name=name)
        folder.write_state(JobState(state=state))
        os.utime(folder.path / "state.json", (ended_at, ended_at))

    make_old("a-old", ENDED, long_ago)
    make_old("d-recent", ENDED, time.time())
    make_old("e-runs", RUNNING, long_ago)
    make_old("f-damaged", "no state", long_ago)
    (tmp_path / "jobs" / "f-damaged" / "node-0" / "state.json").write_text("{")
    make_old("g-kept", ENDED, long_ago)
    # Of an earlier version, perhaps.
    make_old("h-unreadable", ENDED, long_ago)
    (tmp_path / "jobs" / "h-unreadable" / "node-0" / "spec.json").write_text("{")
    with JobFolder(tmp_path / "jobs" / "g-kept" / "node-0").held():
        remove_old(tmp_path / "jobs")
    left = sorted(path.name for path in (tmp_path / "jobs").iterdir())
    assert left == ["d-recent", "e-runs", "f-damaged", "g-kept"]


def test_a_keeper_is_waited_for_as_long_as_it_loads(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_service, "START_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    link: Any = SimpleNamespace(is_alive=True, read=lambda: time.sleep(0.01))
    node = NodePlan(join_timeout_s=600)
    variables = {"PATH": str(tools)}
    job = make_folder(tmp_path, cwd="/nowhere", node=node, variables=variables)
    units.start_keeper(job, grace_s=1.0)
    host_service._wait_for_keeper(job, link)
    assert job.has_keeper()
    while not job.state().why:  # until it handles signals
        time.sleep(0.05)
    send_signal(units.keepers(job), signal.SIGUSR1)
    while job.ended_at() is None:
        time.sleep(0.05)

    broken = make_folder(tmp_path, name="broken")
    (broken.path / "spec.json").write_text("{")
    units.start_keeper(broken, grace_s=1.0)
    with pytest.raises(DrumlineError, match="the job's keeper did not start"):
        host_service._wait_for_keeper(broken, link)


def test_a_keeper_that_becomes_another_program_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it has no command for a moment, which is long where its Python is on a slow disk."""
    job = make_folder(tmp_path)
    commands = iter([[os.getpid()]])
    monkeypatch.setattr(units, "keepers", lambda _: next(commands, []))
    ticks = iter(range(3))

    def read() -> None:
        if next(ticks, None) is None:
            job.write_state(JobState(state=RUNNING))

    link: Any = SimpleNamespace(is_alive=True, read=read)
    host_service._wait_for_keeper(job, link)
    assert job.state().state == RUNNING
