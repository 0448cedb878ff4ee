"""What the controller makes of what it hears: whose failure was first, whose loss can be borne."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.base.rank_environment import ScriptWatch
from drumline.launch.hosts import Host
from drumline.launch.node_plan import NodePlan, Program, nodes_of_hosts
from drumline.launch.ssh import controller as controller_module
from drumline.launch.ssh import host_connection as connection_module
from drumline.launch.ssh import hosts_launcher
from drumline.launch.ssh.controller import Controller
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.hosts_launcher import run_attempts
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import PROTOCOL

Make = Callable[..., Controller]


@pytest.fixture(name="screen_file")
def _screen_file(tmp_path: Path) -> Path:
    return tmp_path / "screen"


@pytest.fixture(name="make")
def _make(screen_file: Path) -> Iterator[Make]:
    """A controller of hosts a, b and c, which nothing has been started on."""
    with screen_file.open("wb") as file:
        screen = Screen(file.fileno(), file.fileno())

        def make(**changes: Any) -> Controller:
            hosts = [Host("a"), Host("me@b"), Host("c")]
            job = HostsJob(
                job="j",
                hosts=hosts,
                nodes=nodes_of_hosts(hosts, 1, [NodePlan()] * len(hosts)),
                program=Program(("train.py", "a secret argument")),
                client=["ssh"],
                python="/py thon",
                cwd=Path("/code"),
                logs=Path("logs"),
                environment={"TOKEN": "hunter2"},
                grace_s=1,
            )
            return Controller(replace(job, **changes), screen)

        yield make
        screen.close()


def hear(remote: Remote, kind: str, **content: Any) -> None:
    remote.connection.on_frame = remote._receive
    remote.connection._receive(json.dumps({"kind": kind, **content}).encode())


def conclude(controller: Controller, screen_file: Path) -> tuple[int, list[str]]:
    code = hosts_launcher.conclude(controller)
    controller.screen.close()
    return code, screen_file.read_text().splitlines()


async def start(controller: Controller, left: int = 0) -> tuple[Remote, Remote, Remote]:
    a, b, c = controller.remotes
    for rank, remote in enumerate((a, b, c)):
        hear(remote, "hello", host=remote.name, protocol=PROTOCOL)
        hear(remote, "started", ranks=[rank], world_size=3, start=0, restarts_left=left)
    return a, b, c


def test_nothing_secret_is_on_a_command_line(make: Make) -> None:
    controller = make(
        python_path="/lib", script_watch=ScriptWatch(run="/logs", on_hang="stop", hang_s=9)
    )
    for remote in controller.remotes:
        shown = f"{remote.connection.words}{remote}{controller.job}"
        assert "hunter2" not in shown
        assert len(remote.spec["secret"]) == 64
        assert remote.spec["secret"] not in shown
        assert "secret" not in f"{remote.connection.words}"
        assert remote.spec["script_watch"] == {
            "run": "/logs",
            "on_hang": "stop",
            "hang_s": 9,
            "lost_s": 20,
            "prometheus": "",
        }
    words = controller.remotes[1].connection.words
    assert words[-2:] == [
        "me@b",
        "env --chdir=/code PYTHONPATH=/lib '/py thon' -m drumline.launch.ssh.supervisor",
    ]


DIAGNOSIS = {
    "alarm": "hang",
    "action": "stop",
    "sentence": "hang: rank 1 stands. Try: look",
    "was_printed": False,
}


@pytest.mark.parametrize(
    ("alarm", "code", "ends_with", "was_printed", "is_ranks_error"),
    [
        ("hang", -9, 70, False, False),
        ("failure", -9, 1, True, True),
        ("failure", 7, 7, False, False),
        ("failure", 7, 7, False, True),
    ],
)
def test_a_diagnosis_of_the_sidecars_is_printed_once_and_decides_the_code(
    make: Make,
    screen_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    alarm: str,
    code: int,
    ends_with: int,
    was_printed: bool,
    is_ranks_error: bool,
) -> None:
    monkeypatch.setattr(controller_module, "SETTLE_S", 0.01)

    async def go() -> Controller:
        controller = make()
        hosts = await start(controller)
        failed = {
            "code": code,
            "restarts_left": 1,
            "start": 0,
            "last_lines": ["words"],
            "is_watched": True,
        }
        # The first time all are started again. It is printed once, unless one of the hosts has had it
        # on the screen.
        for rank, remote in enumerate(hosts):
            hear(remote, "failed", rank=rank, failed_at=float(rank), **failed)
            hear(
                remote,
                "diagnosis",
                **{**DIAGNOSIS, "was_printed": was_printed and rank == 2},
                is_last=False,
            )
        await asyncio.sleep(0.05)
        await start(controller)
        assert all(remote.diagnosis is None for remote in hosts)
        for rank, remote in enumerate(hosts):
            hear(remote, "failed", rank=rank, failed_at=float(rank), **failed)
            diagnosis = {**DIAGNOSIS, "alarm": alarm, "rank": 1, "is_ranks_error": is_ranks_error}
            hear(remote, "diagnosis", **diagnosis, is_last=True)
        return controller

    ended, lines = conclude(asyncio.run(go()), screen_file)
    assert ended == ends_with
    first, *last = lines[1:] if was_printed else lines[2:]
    assert lines[1] == "drumline: hang: rank 1 stands. Try: look"
    if code < 0 or not is_ranks_error:
        assert (first, last) == (lines[1], ["drumline: logs in logs on each host"])
    else:
        assert first == "drumline: rank 1 on b (exit code 7) failed first: words", (
            "not the one that was earlier"
        )
        assert "stands" not in "".join(last)


def test_the_hosts_are_told_which_one_is_silent_and_so_is_the_user(
    make: Make, screen_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.launch.ssh.controller.HEARTBEAT_S", 0.01)
    sent: list[list[int]] = []

    async def go() -> Controller:
        controller = make()
        a, b, c = await start(controller)
        controller.has_started = True
        monkeypatch.setattr(a.connection, "send", lambda frame: sent.append(frame["nodes"]))
        watching = asyncio.create_task(controller.silence.watch())
        for silent_s in (0, 2, 11, 11, 0):
            now = time.monotonic()
            a.connection.heard_at = now
            c.connection.heard_at = now
            b.connection.heard_at = now - silent_s
            await asyncio.sleep(0.1)
        watching.cancel()
        return controller

    asyncio.run(go()).screen.close()
    assert sent == [[1], []]
    assert screen_file.read_text().splitlines()[1:] == [
        "drumline: warning: no heartbeat from b for 11 s on this machine; it counts as lost after 45 s"
    ]


def test_a_host_that_was_cut_off_repeats_nothing_and_is_named_when_another_ends_for_it(
    make: Make, screen_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "SETTLE_S", 0.01)

    async def go() -> Controller:
        controller = make(
            nodes=nodes_of_hosts(
                [Host("a"), Host("b"), Host("c")], 1, [NodePlan(max_restarts=3)] * 3
            )
        )
        a, b, c = await start(controller, left=3)
        controller.has_started = True
        diagnosis = {**DIAGNOSIS, "action": "restart", "is_last": False}
        hear(a, "diagnosis", **diagnosis)
        await asyncio.sleep(0.05)
        hear(b, "diagnosis", **{**diagnosis, "sentence": "hang: rank 0 on a. Try: look"})
        await asyncio.sleep(0.05)
        a.connection.heard_at = time.monotonic() - 5
        hear(c, "ended", code=1, last_lines=[])
        await asyncio.sleep(0.05)
        return controller

    controller = asyncio.run(go())
    controller.screen.close()
    assert screen_file.read_text().splitlines()[1:] == [f"drumline: {DIAGNOSIS['sentence']}"]
    assert controller.lost == "no heartbeat from a on this machine"


def test_a_wrong_clock_does_not_change_who_was_first(make: Make, screen_file: Path) -> None:
    async def go() -> Controller:
        controller = make()
        a, b, _ = await start(controller)
        now = time.time()
        a.connection._heartbeats[0] = b.connection._heartbeats[0] = now
        hear(a, "heartbeat", number=0, now=now + 1000)  # its clock is fast
        hear(b, "heartbeat", number=0, now=now)
        failed = {"code": 7, "restarts_left": 0, "start": 0}
        hear(b, "failed", rank=1, failed_at=now + 3, last_lines=["late"], **failed)
        hear(a, "failed", rank=0, failed_at=now + 1002, last_lines=["first"], **failed)
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert code == 7
    assert lines[1:5] == [
        "drumline: rank 0 on a (exit code 7) failed first: first",
        "  try: read the lines above that begin with [a 0]",
        "drumline: the others: rank 1 on b (exit code 7) failed after it; 1 rank was stopped",
        "drumline: logs in logs on each host",
    ]


def test_failures_before_a_restart_are_forgotten(make: Make, screen_file: Path) -> None:
    async def go() -> Controller:
        controller = make()
        a, b, c = await start(controller)
        hear(b, "failed", rank=1, code=9, failed_at=1.0, restarts_left=1, last_lines=[], start=0)
        hear(b, "started", ranks=[1], world_size=3, start=1, restarts_left=0)
        for remote in (a, b, c):
            hear(remote, "ended", code=0, last_lines=[])
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert (code, lines[-1]) == (0, "drumline: done; logs in logs on each host")


def test_ranks_that_fail_after_a_host_was_lost_are_not_to_blame(
    make: Make, screen_file: Path
) -> None:
    async def go() -> Controller:
        controller = make()
        a, b, _ = await start(controller)
        hear(
            a,
            "failed",
            rank=0,
            code=1,
            failed_at=time.time() + 1,
            restarts_left=0,
            last_lines=["reset"],
            start=0,
        )
        b.connection.ssh_code = 255
        controller._lost(b)
        assert controller.is_ending
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert code == 1
    assert lines[1] == "drumline: error: the connection to me@b was lost: it was closed"
    assert lines[3] == (
        "drumline: the others: rank 0 on a (exit code 1) failed after it; 2 ranks were stopped"
    )


def test_a_job_that_may_have_fewer_nodes_continues_without_one(
    make: Make, screen_file: Path
) -> None:
    async def go() -> Controller:
        controller = make(min_nodes=2, spares=[Host("d")])
        _, b, c = await start(controller)
        c.connection.ssh_code = 255
        controller._lost(c)
        assert not controller.is_ending
        assert controller.reconnect.last_heard == {c.host: c.connection.heard_at}, (
            "a spare must wait for its end in a later attempt"
        )
        b.connection.ssh_code = 255
        controller._lost(b)
        assert controller.is_ending, "one is less than two"
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert code == 1
    assert lines[0] == "drumline: 3 ranks run on 3 hosts (a, b, c)", (
        "with spares it may be any of them"
    )
    assert (
        lines[1]
        == "drumline: warning: the connection to c was lost: it was closed; the job continues with a, b"
    )
    assert lines[2] == "drumline: error: the connection to me@b was lost: it was closed"

    async def lose_first() -> None:
        controller = make(min_nodes=2)
        a, *_ = await start(controller)
        a.connection.ssh_code = 255
        controller._lost(a)
        assert controller.is_ending, "all meet at the first"

    asyncio.run(lose_first())


def test_a_host_that_is_shut_down_takes_its_own_part_alone(make: Make, screen_file: Path) -> None:
    async def shut_down() -> Controller:
        controller = make(min_nodes=2, program=Program(("train", "digits"), is_task=True))
        a, b, c = await start(controller)
        hear(c, "failed", rank=2, code=-15, failed_at=1.0, restarts_left=3, last_lines=[], start=0)
        hear(c, "ended", code=130, last_lines=[])
        assert controller.dropped == [c], "a signal ended that host's part alone"
        controller.interrupted(signal.SIGTERM)
        for remote in (a, b):
            hear(remote, "ended", code=75, last_lines=[])
        return controller

    code, lines = conclude(asyncio.run(shut_down()), screen_file)
    assert code == 75, "all that were left have saved"
    assert "drumline: warning: the job was ended on c; the job continues with a, b" in lines


@pytest.mark.parametrize(("rank_code", "ends_with"), [(75, 75), (-9, 1)])
def test_agents_that_are_ended_after_their_ranks_have_saved(
    make: Make, screen_file: Path, rank_code: int, ends_with: int
) -> None:
    """A notice on one host; its agent was still ending when the controller ended all."""

    async def leave() -> Controller:
        controller = make(program=Program(("train", "digits"), is_task=True))
        hosts = await start(controller)
        for rank, remote in enumerate(hosts):
            code = 75 if rank else rank_code
            hear(
                remote,
                "failed",
                rank=rank,
                code=code,
                failed_at=float(rank),
                restarts_left=0,
                last_lines=[],
                start=0,
            )
            hear(remote, "ended", code=-15, last_lines=[])
        return controller

    code, lines = conclude(asyncio.run(leave()), screen_file)
    saved = (
        "drumline: preempted by a signal or a notice to a rank; the ranks have saved: rerun "
        "the same command to resume"
    )
    assert (code, saved in lines) == (ends_with, ends_with == 75), lines


def test_a_killed_agent_is_a_restart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "SETTLE_S", 0.01)

    async def go() -> Controller:
        controller = make()
        a, *_ = await start(controller, left=3)
        hear(a, "ended", code=-9, last_lines=[])
        await asyncio.sleep(0.05)
        return controller

    assert asyncio.run(go()).lost == "the launcher's agent on a was killed by SIGKILL"


def test_an_agent_that_was_killed_is_named(make: Make, screen_file: Path) -> None:
    async def go() -> Controller:
        controller = make()
        a, *_ = await start(controller)
        hear(a, "ended", code=-9, last_lines=["what a log had last"])
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert code == 1
    assert lines[-3:] == [
        "drumline: the launcher's agent on a was killed by SIGKILL, which ended its ranks",
        "  try: find out who killed it: an operator, a batch system, or the OOM killer (dmesg on a)",
        "drumline: logs in logs on each host",
    ]


@pytest.mark.parametrize("restarts_left", [0, 3])
def test_an_agent_that_its_supervisor_ended_was_killed_by_nobody_else(
    make: Make, screen_file: Path, restarts_left: int
) -> None:
    async def go() -> Controller:
        controller = make()
        a, *_ = await start(controller, left=restarts_left)
        hear(a, "ended", code=-9, last_lines=[], end_reason="ended by SIGTERM")
        return controller

    ended = asyncio.run(go())
    what = "drumline ended the job on a: ended by SIGTERM"
    if restarts_left:
        assert ended.lost == what
        return
    code, lines = conclude(ended, screen_file)
    assert code == 1
    assert lines[-3:] == [
        f"drumline: {what}",
        "  try: read the log of a",
        "drumline: logs in logs on each host",
    ]


def test_a_host_that_is_found_lost_when_the_others_are_done_is_no_failure(
    make: Make, screen_file: Path
) -> None:
    async def go() -> Controller:
        controller = make(min_nodes=2)
        a, b, c = await start(controller)
        # c is frozen: nothing is known of it yet
        for rank, remote in enumerate((a, b)):
            hear(remote, "started", ranks=[rank], world_size=2, start=1, restarts_left=0)
        for remote in (a, b):
            hear(remote, "ended", code=0, last_lines=[])
        c.connection.ssh_code = 255
        controller._lost(c)
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert code == 0
    assert lines[1:] == [
        "drumline: 2 ranks run on 2 hosts",
        "drumline: warning: the connection to c was lost: it was closed; the others are done",
        "drumline: done; logs in logs on each host",
    ]


def test_another_version_is_named(make: Make, screen_file: Path) -> None:
    async def go() -> Controller:
        controller = make()
        hear(controller.remotes[1], "refused", problems=[])
        return controller

    code, lines = conclude(asyncio.run(go()), screen_file)
    assert code == 3
    assert lines[0] == "drumline: error: b: it has another version of drumline"


# As ssh is called, and as it is answered: a host that says hello and is done, or one that refuses
# us.
FAKE_SSH = """#!/bin/sh
for alarm; do last=$alarm host=$before before=$alarm; done
echo "$host" >> {log}
[ "$host" = h13 ] && echo "Permission denied" >&2 && exit 255
echo '{{"kind": "hello", "host": "x", "protocol": {protocol}}}'
read -r spec; read -r beat; read -r end
echo '{{"kind": "ended", "code": 130, "last_lines": []}}'
"""


def test_of_many_hosts_one_that_refuses_us_ends_the_start(
    make: Make, screen_file: Path, tmp_path: Path
) -> None:
    client = tmp_path / "ssh"
    log = tmp_path / "log"
    client.write_text(FAKE_SSH.format(log=log, protocol=PROTOCOL))
    client.chmod(0o755)
    hosts = [Host(f"h{number}") for number in range(40)]
    nodes = nodes_of_hosts(hosts, 1, [NodePlan()] * len(hosts))
    job = replace(make().job, hosts=hosts, nodes=nodes, client=[str(client)])
    screen = make().screen
    assert asyncio.run(run_attempts(job, screen)) == 3
    screen.close()
    assert (
        "drumline: error: h13: it rejected the ssh key (Permission denied)\n"
        in screen_file.read_text()
    )
    called = log.read_text().split()
    assert "h13" in called
    assert len(called) < 40, "the last ones were not asked any more"


def test_a_host_that_says_nothing_is_named_and_an_ssh_that_does_not_listen_is_killed(
    make: Make, screen_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEARTBEAT_S", 0.6)
    monkeypatch.setattr(connection_module, "HANG_UP_S", 0.1)
    client = tmp_path / "ssh"
    # What a wrapper starts has our pipes too.
    client.write_text("#!/bin/sh\ntrap '' TERM\nsleep 1000\nsleep 1000\n")
    client.chmod(0o755)
    hosts = [Host("slow")]
    nodes = [replace(make().job.nodes[0], join_timeout_s=0)]
    controller = make(hosts=hosts, nodes=nodes, client=[str(client)])
    assert asyncio.run(run_attempts(controller.job, controller.screen)) == 3
    controller.screen.close()
    assert (
        "drumline: error: slow: ssh connects, but nothing starts (no answer within 1 s)\n"
        "  try: check what `ssh slow /py thon -V` waits for: "
    ) in screen_file.read_text()


def test_a_host_that_ended_its_ranks_because_it_was_cut_off_is_a_restart_and_no_preemption(
    make: Make,
) -> None:
    async def go() -> Controller:
        controller = make(
            nodes=nodes_of_hosts(
                [Host("a"), Host("b"), Host("c")], 1, [NodePlan(max_restarts=3)] * 3
            )
        )
        _, b, _ = await start(controller, left=3)
        why = "no heartbeat of the launcher for 45 s"
        hear(b, "ended", code=75, last_lines=[], end_reason=why)
        return controller

    assert asyncio.run(go()).lost == (
        "drumline ended the job on b: no heartbeat of the launcher for 45 s"
    )


CONTINUES = Program(("train", "digits"), is_task=True, continues=True)


def test_a_host_that_answers_again_gets_the_hosts_without_a_heartbeat(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def go() -> None:
        controller = make(program=CONTINUES)
        _, _, c = await start(controller)
        controller.dropped.append(c)
        controller.silence.silent_nodes = [1]
        monkeypatch.setattr(c.connection, "send", sent.append)
        hear(c, "hello", host="c", protocol=PROTOCOL)

    asyncio.run(go())
    assert [frame["kind"] for frame in sent] == ["start", "silent"]
    assert sent[1]["nodes"] == [1], "later it gets only changes"


def test_a_job_is_not_over_while_a_host_is_tried_again(make: Make) -> None:
    async def go() -> None:
        controller = make(program=CONTINUES)
        a, b, c = await start(controller)
        controller.dropped.append(c)
        hear(a, "ended", code=0, last_lines=[])
        b.connection.ssh_code = 255  # of the last try
        controller._check_over()
        assert not controller._is_over.is_set()
        hear(b, "ended", code=0, last_lines=[])
        controller._check_over()
        assert controller._is_over.is_set()

    asyncio.run(go())


def test_a_host_that_others_do_not_know_by_its_name_has_the_address_of_ssh(make: Make) -> None:
    controller = make()
    a, b, c = controller.remotes
    for remote, address in ((a, "10.0.0.1"), (b, "fd00::2"), (c, "-oProxyCommand=x")):
        content = {"address": address, "unknown_names": ["b", "c"] if remote is a else []}
        remote._remember({"kind": "hello", "protocol": PROTOCOL, **content})
    nodes = controller.job.placed(controller.hosts_with_addresses())
    assert [node.address for node in nodes] == ["a", "fd00::2", "c"], "as no option for ssh"
    assert nodes[1].peers == ("a", "b", "c"), "people know them by their names"


def test_a_host_differs_by_its_line_in_the_hostfile(make: Make) -> None:
    hosts = [Host("a"), Host("me@b", None, "", "/other/python", "/else where"), Host("c")]
    controller = make(hosts=hosts)
    a, b, _ = (" ".join(remote.connection.words) for remote in controller.remotes)
    assert "--chdir=/code '/py thon' -m" in a
    assert "'--chdir=/else where' /other/python -m" in b


def test_a_host_is_stuck_when_it_takes_longer_than_the_others() -> None:
    times = connection_module.StartTimes(least_s=8.0, most_s=60.0)
    assert times.limit_s == 60.0, "none has answered"
    times.measured_s.append(0.5)
    assert times.limit_s == 8.0
    times.measured_s.append(10.0)
    assert times.limit_s == 30.0
    times.measured_s.append(50.0)
    assert times.limit_s == 60.0
