"""Whether a job on several hosts is restarted when a host was lost: how often, where, and the
messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.base.rank_environment import RESTARTED
from drumline.launch.hosts import Host
from drumline.launch.node.local import STOPPED_BETWEEN
from drumline.launch.node_plan import NodePlan, Program, nodes_of_hosts
from drumline.launch.ssh import controller as controller_module
from drumline.launch.ssh import host_connection as connection_module
from drumline.launch.ssh import hosts_launcher
from drumline.launch.ssh.controller import Controller
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.hosts_launcher import run_attempts
from drumline.launch.ssh.remote import Search
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import PROTOCOL
from tests.unit.launch.test_controller import DIAGNOSIS, hear


def make_job(*names: str, max_restarts: int = 3, **changes: Any) -> HostsJob:
    hosts = [Host(name) for name in names]
    return HostsJob(
        job="first",
        hosts=hosts,
        nodes=nodes_of_hosts(
            hosts,
            29500,
            [NodePlan(num_procs=2, max_restarts=max_restarts, job="first")] * len(hosts),
        ),
        program=Program(("train", "digits"), is_task=True),
        python="python",
        cwd=Path("/code"),
        logs=Path("logs"),
        **{"client": ["ssh"], "grace_s": 1, **changes},
    )


# A host over ssh: each call is answered by the next file of its own, and notes what it was told.
FAKE_SSH = """#!/bin/sh
for word; do host=$before before=$word; done
number=$(cat {folder}/$host.calls 2>/dev/null | wc -l); echo call >> {folder}/$host.calls
answer={folder}/$host.$number; [ -e "$answer" ] || answer={folder}/default
. "$answer"
"""
AWAIT = """frame=
until echo "$frame" | grep -q '"kind":"KIND"'; do read -r frame || exit 255; done
"""
HELLO = f"""
{AWAIT.replace("KIND", "spec")}echo "$frame" >> {{folder}}/$host.specs
echo '{{{{"kind": "hello", "host": "x", "protocol": {PROTOCOL}}}}}'
{AWAIT.replace("KIND", "start")}echo "$frame" >> {{folder}}/$host.starts
echo '{{{{"kind": "started", "ranks": [0], "world_size": 2, "start": {{start}}, "restarts_left": {{left}}}}}}'
"""
ENDS = """echo '{{"kind": "ended", "code": {code}, "last_lines": []}}'"""
WAITS = AWAIT.replace("KIND", "end") + ENDS.format(code=-9)
# A host whose disk is full does not answer before there is space; the launch ends by hanging up.
NO_SPACE = f"""
{AWAIT.replace("KIND", "spec")}echo "$frame" >> {{folder}}/$host.specs
exec sleep 3600
"""
REFUSED = "echo 'ssh: connect to host x port 22: Connection refused' >&2; exit 255"


def go(folder: Path, job: HostsJob, answers: dict[str, str]) -> tuple[int, list[str]]:
    """A launch over these answers, each named HOST.CALL: its exit code, and what it said."""
    client = folder / "ssh"
    screen_file = folder / "said"
    client.write_text(FAKE_SSH.format(folder=folder))
    client.chmod(0o755)
    for name, text in answers.items():
        (folder / name).write_text(text.replace("{folder}", str(folder)))
    with screen_file.open("wb") as file:
        screen = Screen(file.fileno(), file.fileno())
        code = asyncio.run(run_attempts(job, screen))
        screen.close()
    return code, screen_file.read_text().splitlines()


def hello(start: int = 0, left: int = 3) -> str:
    return (
        HELLO.replace("{start}", str(start))
        .replace("{left}", str(left))
        .replace("{{", "{")
        .replace("}}", "}")
    )


def test_a_killed_agent_is_one_restart_of_all_and_a_host_that_is_down_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "RETRY_S", 0.01)
    job = make_job("a", "b", client=[str(tmp_path / "ssh")], spares=[Host("c"), Host("d")])
    code, lines = go(
        tmp_path,
        job,
        {
            "a.0": hello() + WAITS,
            "a.1": hello(1, 2) + ENDS.format(code=0),
            "b.0": hello() + ENDS.format(code=-9),
            "b.1": REFUSED,
            "c.0": REFUSED,
            "d.0": hello(1, 2) + ENDS.format(code=0),
        },
    )
    assert code == 0, lines
    assert [line for line in lines if "ranks run on" not in line] == [
        "drumline: 2 hosts; logs in logs on each",
        "drumline: warning: the launcher's agent on b was killed by SIGKILL; "
        "restarting all ranks (restart 1 of 3), resuming from the newest checkpoint",
        "drumline: c replaces b, which is unreachable (ssh: connect to host x port 22: Connection refused)",
        "drumline: d replaces c, which is unreachable (ssh: connect to host x port 22: Connection refused)",
        "drumline: done; logs in logs on each host",
    ]
    (first, second) = map(json.loads, (tmp_path / "a.specs").read_text().splitlines())
    assert (first["earlier"], second["earlier"]) == ([], ["first"])
    (again,) = (tmp_path / "d.starts").read_text().splitlines()
    assert '"peers":["a","d"]' in again


CONTINUES = Program(("train", "digits"), is_task=True, continues=True)
UNTIL = "until [ CONDITION ]; do sleep 0.02; done\n"


def test_a_lost_host_that_answers_again_joins_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "JOIN_AGAIN_S", 0.05)
    job = replace(make_job("a", "b", client=[str(tmp_path / "ssh")]), program=CONTINUES)
    code, lines = go(
        tmp_path,
        job,
        {
            "a.0": hello() + UNTIL.replace("CONDITION", "-e {folder}/joined") + ENDS.format(code=0),
            "b.0": hello() + "exit 255",
            "b.1": REFUSED,
            "b.2": hello(1) + "touch {folder}/joined\n" + ENDS.format(code=0),
        },
    )
    assert code == 0, lines
    assert [line for line in lines if "ranks run on" not in line] == [
        "drumline: 2 hosts; logs in logs on each",
        "drumline: warning: the connection to b was lost: it was closed; the job continues with a",
        "drumline: b answers again; its ranks join the others",
        "drumline: done; logs in logs on each host",
    ]
    (first, second) = map(json.loads, (tmp_path / "b.specs").read_text().splitlines())
    assert (first["job"], first["secret"]) == (second["job"], second["secret"])
    assert (first["earlier"], second["earlier"]) == ([], ["first"]), (
        "what is left of its ranks is ended"
    )
    assert second["environment"]["DRUMLINE_RESTARTED"] == "1"
    assert (first["first_start"], second["first_start"]) == (0, 1), "its logs have other names"
    assert len((tmp_path / "b.starts").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("answer", "warning"),
    [
        ("exec sleep 1000", None),
        (
            """echo '{"kind": "refused", "problems": [["there is no file x in /code", "copy it"]]}'""",
            "drumline: warning: b cannot join again: there is no file x in /code",
        ),
        (
            """echo '{"kind": "refused", "problems": []}'""",
            "drumline: warning: b cannot join again: it has another version of drumline",
        ),
    ],
    ids=["silent", "refused", "another version"],
)
def test_a_lost_host_that_does_not_come_back_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, warning: str | None
) -> None:
    monkeypatch.setattr(controller_module, "JOIN_AGAIN_S", 0.05)
    job = replace(make_job("a", "b", client=[str(tmp_path / "ssh")]), program=CONTINUES)
    was_tried = UNTIL.replace("CONDITION", '"$(cat {folder}/b.calls | wc -l)" -gt 1')
    pause = (
        ""
        if warning is None
        else UNTIL.replace("CONDITION", '"$(grep -c cannot {folder}/said)" -gt 0')
    )
    code, lines = go(
        tmp_path,
        job,
        {
            "a.0": hello() + was_tried + pause + ENDS.format(code=0),
            "b.0": hello() + "exit 255",
            "default": answer,
        },
    )
    assert code == 0, lines
    assert [line for line in lines if "ranks run on" not in line][2:] == [
        *([] if warning is None else [warning]),
        "drumline: done; logs in logs on each host",
    ]


@pytest.fixture(name="screen")
def _screen(tmp_path: Path) -> Iterator[Screen]:
    with (tmp_path / "said").open("wb") as file:
        screen = Screen(file.fileno(), file.fileno())
        yield screen
        screen.close()


@pytest.mark.parametrize(
    ("left", "number", "diagnosis", "is_restarted"),
    [
        (2, None, None, True),
        (0, None, None, False),
        (2, signal.SIGTERM, None, False),
        (2, None, DIAGNOSIS, False),
    ],
)
def test_a_lost_host_is_a_restart_while_that_is_allowed_and_may_help(
    screen: Screen,
    left: int,
    number: signal.Signals | None,
    diagnosis: dict[str, Any] | None,
    is_restarted: bool,
) -> None:
    async def lose() -> Controller:
        controller = Controller(make_job("a", "b"), screen)
        for rank, remote in enumerate(controller.remotes):
            hear(remote, "hello", host="x", protocol=PROTOCOL)
            hear(remote, "started", ranks=[rank], world_size=2, start=0, restarts_left=left)
        if number:
            controller.interrupted(number)
        a, b = controller.remotes
        if diagnosis:
            hear(a, "diagnosis", **diagnosis, is_last=True)
        b.connection.ssh_code = 255
        controller._lost(b)
        return controller

    assert bool(asyncio.run(lose()).lost) is is_restarted


@pytest.mark.parametrize(
    ("max_restarts", "reached_step", "failed_with", "left"),
    [(3, 40, None, 0), (3, 41, None, 3), (0, 41, None, 0), (3, 41, 2, 2), (3, 41, 0, 0)],
    ids=[
        "the same step",
        "progress",
        "none are allowed",
        "counted by an agent",
        "a restart cannot help",
    ],
)
def test_a_lost_host_after_progress_leaves_all_restarts(
    screen: Screen, max_restarts: int, reached_step: int, failed_with: int | None, left: int
) -> None:
    async def lose() -> Controller:
        controller = Controller(make_job("a", "b", max_restarts=max_restarts), screen)
        for rank, remote in enumerate(controller.remotes):
            hear(remote, "hello", host="x", protocol=PROTOCOL)
            hear(remote, "started", ranks=[rank], world_size=2, start=0, restarts_left=0)
            hear(remote, "progress", reached_step=40, counted_step=40)
        a, b = controller.remotes
        hear(b, "progress", reached_step=reached_step, counted_step=40)
        if failed_with is not None:
            hear(
                a,
                "failed",
                rank=0,
                code=1,
                failed_at=1.0,
                restarts_left=failed_with,
                last_lines=[],
                start=0,
            )
        return controller

    controller = asyncio.run(lose())
    assert controller.reached_step == reached_step
    assert controller.restarts_left == left


FAILED = """echo '{"kind": "failed", "rank": 0, "code": CODE, "restarts_left": 0, "failed_at": 1.0, "last_lines": [], \
"start": 0, "full_disk": "DISK"}'
"""


@pytest.mark.parametrize(
    ("code", "full_disk", "sentence"),
    [
        (
            75,
            "",
            "warning: preempted by a signal or a notice to a rank, and saved; resuming on the same hosts",
        ),
        (
            1,
            "/mnt/run",
            "warning: the disk of /mnt/run on a is full; the run resumes when there is space there. "
            "Try: free some space",
        ),
    ],
)
@pytest.mark.parametrize("keep_going", [True, False])
def test_a_launch_that_keeps_going_resumes_without_a_restart(
    tmp_path: Path, code: int, full_disk: str, sentence: str, keep_going: bool
) -> None:
    failed = FAILED.replace("CODE", str(code))
    ends = ENDS.format(code=code)
    job = make_job("a", "b", client=[str(tmp_path / "ssh")], keep_going=keep_going)
    ended_with, lines = go(
        tmp_path,
        job,
        {
            "a.0": hello() + failed.replace("DISK", full_disk) + ends,
            "a.1": hello(1) + ENDS.format(code=0),
            "b.0": hello() + failed.replace("DISK", "") + ends,
            "b.1": hello(1) + ENDS.format(code=0),
        },
    )
    if not keep_going:
        assert ended_with == code
        return
    assert ended_with == 0, lines
    assert f"drumline: {sentence}" in lines
    assert not any("restart 1" in line for line in lines)
    specs = [json.loads((tmp_path / f"{host}.specs").read_text().splitlines()[1]) for host in "ab"]
    assert [spec["full_disk"] for spec in specs] == [full_disk, ""], (
        "only the host whose disk was full waits"
    )
    assert [spec["node"]["restarts_used"] for spec in specs] == [0, 0]
    assert [spec["environment"] for spec in specs] == [{RESTARTED: "1"}] * 2


@pytest.mark.parametrize(
    ("number", "ends_with", "last"),
    [
        (
            signal.SIGTERM,
            75,
            "drumline: preempted by SIGTERM; the ranks have saved: rerun the same command to resume",
        ),
        (
            signal.SIGINT,
            130,
            "drumline: interrupted; rerun the same command to resume from the newest checkpoint, if one was saved",
        ),
    ],
)
def test_a_signal_in_the_pause_between_two_attempts_ends_the_launch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    ends_with: int,
    last: str,
) -> None:
    monkeypatch.setattr(hosts_launcher, "next_pause_s", lambda pause_s, ran_s: 3600.0)
    preempted = FAILED.replace("CODE", "75").replace("DISK", "") + ENDS.format(code=75)
    screen_file = tmp_path / "said"

    def interrupt() -> None:
        while (
            not screen_file.exists()
            or screen_file.read_text().count("resuming on the same hosts") < 2
        ):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    job = make_job("a", client=[str(tmp_path / "ssh")], keep_going=True)
    code, lines = go(
        tmp_path,
        job,
        {"a.0": hello() + preempted, "a.1": hello(1) + preempted, "a.2": hello(2) + WAITS},
    )
    assert code == ends_with, lines
    assert lines[-2] == last
    assert not any("ending the ranks" in line for line in lines), "there are none"
    assert len((tmp_path / "a.specs").read_text().splitlines()) == 2, "no third attempt began"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "pause_s", [0.0, 3600.0], ids=["the host waits for space", "the launch pauses"]
)
def test_a_signal_while_a_disk_is_full_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, pause_s: float
) -> None:
    """A SIGTERM is a preemption: no rank runs, and the same command resumes."""
    monkeypatch.setattr(hosts_launcher, "next_pause_s", lambda *_: pause_s)
    failed = FAILED.replace("CODE", "1").replace("DISK", "/mnt/run") + ENDS.format(code=1)
    screen_file = tmp_path / "said"
    specs = tmp_path / "a.specs"
    num_specs = 3 if pause_s == 0 else 2

    def interrupt() -> None:
        while (
            not screen_file.exists()
            or screen_file.read_text().count("is full; the run resumes") < 2
        ):
            time.sleep(0.01)
        while len(specs.read_text().splitlines()) < num_specs:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    job = make_job("a", client=[str(tmp_path / "ssh")], keep_going=True)
    code, lines = go(
        tmp_path, job, {"a.0": hello() + failed, "a.1": hello(1) + failed, "a.2": NO_SPACE}
    )
    if number == signal.SIGTERM:
        assert code == 75, lines
        assert lines[-2] == f"drumline: {STOPPED_BETWEEN}"
    else:
        assert code == 130, lines
        assert lines[-2].startswith("drumline: interrupted; rerun the same command to resume")


def test_the_next_attempt_has_a_name_and_a_secret_of_its_own() -> None:
    job = make_job("a", "b")
    again = job.again(
        [Host("c"), Host("b")],
        [Host("a")],
        restarts_used=1,
        first_start=4,
        reached_step=40,
        full_disks={},
    )
    spec = again.spec(again.nodes[0])
    assert spec["earlier"] == ("first",)
    assert spec["job"] == again.nodes[1].job != "first"
    assert spec["secret"] != job.secret
    assert spec["first_start"] == 4
    assert spec["environment"] == {RESTARTED: "1"}
    assert again.nodes[1].endpoint == "c:29500", "the nodes meet at the new first one"
    node = again.nodes[0]
    assert (node.address, node.max_restarts, node.restarts_used, node.reached_step) == (
        "c",
        3,
        1,
        40,
    )


@pytest.mark.parametrize(
    ("grace_s", "waits_s", "reconnect_s"), [(0, 51.5, 71.5), (15, 63.5, 83.5), (50, 98.5, 118.5)]
)
def test_a_spare_waits_until_the_part_of_the_lost_host_has_surely_ended(
    screen: Screen, grace_s: float, waits_s: float, reconnect_s: float
) -> None:
    job = make_job("a", "b", earlier=("one",), spares=[Host("c")], grace_s=grace_s)
    controller = Controller(job, screen)
    a = controller.remotes[0]
    now = time.monotonic()
    a.connection.ssh_code = 255
    # Heartbeats of 0.5 s are missed for 45 s, ssh has 2 s to hang up, and then the ranks have their
    # grace.
    controller.reconnect.last_heard[a.host] = now - waits_s + 0.5
    assert controller.reconnect.next_host(a, Search()) == a.host, (
        "its ranks may still write to the run folder"
    )
    controller.reconnect.last_heard[a.host] = now - waits_s - 0.5
    assert controller.reconnect.next_host(a, Search()) == Host("c")
    search = Search()
    search.notice.begin -= reconnect_s - 1
    assert controller.reconnect.next_host(a, search) is not None, (
        "a spare has time to answer after that"
    )
    search.notice.begin -= 2
    assert controller.reconnect.next_host(a, search) is None
    a.connection.ssh_code = 127
    assert controller.reconnect.next_host(a, Search()) is None, (
        "it answers, and what it lacks is not there later"
    )


def test_a_lost_host_and_a_spare_that_are_down_are_tried_in_turn_and_reported_once(
    screen: Screen, tmp_path: Path
) -> None:
    tried_hosts = ask_ten_times(
        Controller(make_job("a", earlier=("x",), spares=[Host("c")]), screen)
    )
    screen.close()
    assert tried_hosts == "ccaaccaacc", "each once a round"
    assert (tmp_path / "said").read_text().splitlines() == [
        "drumline: c replaces a, which is unreachable (no answer)",
        "drumline: waiting for a or c to answer again: 10 s so far, at most 71.5",
    ]


def ask_ten_times(controller: Controller) -> str:
    """Hosts that do not answer: who is asked next. ssh tries each for the same time."""
    search = Search()
    tried_hosts = ""
    host = Host("a")
    search.notice.begin -= 10
    for _ in range(10):
        remote = controller._remote(0, host)
        option = next(word for word in remote.connection.words if "ConnectTimeout=" in word)
        assert option == "-oConnectTimeout=5"
        remote.connection.ssh_code = 255
        following = controller.reconnect.next_host(remote, search)
        assert following is not None
        host = following
        tried_hosts += host.address
    return tried_hosts


def test_a_host_that_only_receives_is_asked_to_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(HostsJob, "lease_s", 0.3)
    monkeypatch.setattr(connection_module, "LAST_FRAME_S", 1.0)
    job = make_job("a", client=[str(tmp_path / "ssh")], max_restarts=0)
    code, lines = go(tmp_path, job, {"a.0": hello(0, 0) + "cat >> {folder}/heard"})
    assert code == 1
    assert "drumline: error: the connection to a was lost: no heartbeat for 0.3 s" in lines
    assert '{"kind":"end","grace_s":0}' in (tmp_path / "heard").read_text().splitlines()
