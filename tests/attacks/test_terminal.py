"""Text from ranks, hosts, users, files and datasets: none of it steers the terminal, or reads as a
line of Drumline's.

Every source is tried with every escape. A source is a place where today's code prints what somebody
else wrote.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline import cli
from drumline.base.errors import PreflightError
from drumline.launch.hosts import Host, hosts_from_file
from drumline.launch.node.rank_logs import LogFollower
from drumline.launch.node_plan import NodePlan, Program, nodes_of_hosts
from drumline.launch.ssh.client import not_reached
from drumline.launch.ssh.controller import Controller
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.hosts_launcher import conclude
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import PROTOCOL
from drumline.metrics.display import PlainDisplay
from drumline.metrics.live import LiveDisplay
from drumline.net.dial import WaitNotice
from drumline.report.verify.run_check import RunReport
from drumline.report.verify.section import Section
from drumline.tools.doctor.doctor_report import report
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.pairs.survey import HostRecord, Survey
from drumline.watch.run_status import RunStatusReader

MARK = "FORGED"
OSC_52 = "\x1b]52;c;Zm9yZ2Vk\x07"
ESCAPES = {
    "clipboard": OSC_52,
    "link": "\x1b]8;;https://example.org\x1b\\click\x1b]8;;\x1b\\",
    "cursor": "\x1b[2A\x1b[2K\x1b[1;1H",
    "title": "\x1b]0;title\x07",
    "device": "\x1bP$qm\x1b\\",
    "paste": "\x1b[200~",
    "keys": "\x1b[>4;2m",
    "reset": "\x1bc",
    "bell": "\x07",
    "backspace": "\b" * 9,
    "return": f"\rdrumline: {MARK}",
    "newline": f"\ndrumline: {MARK}",
    "next step": f"\n  try: {MARK}",
    "tear": f"\x0b\x0c\x85\u2028drumline: {MARK}",
    "C1": "\x9b2J\x9d52;c;Zm9yZ2Vk\x9c",
    "delete": "\x7f",
    "right to left": "\u202e\u2066\u200f",
    "raw bytes": "\udc9b2J",
}
# What our own lines are made of: a line that is drawn anew, colours, and what rich hides and shows
# the cursor with.
OURS = re.compile(
    r"\r?\x1b\[[0-9;]*[mK]|\x1b\[\?25[hl]|\x1b\[1A\x1b\[2K|\r(?=\x1b\[2K|\n)|\x1b\[2K"
)
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def check_harmless(text: str) -> None:
    """Nothing that a terminal obeys, no line that reads as ours, and the text itself is there to be
    read."""
    left = OURS.sub("", text)
    assert not STEERS.search(left), ascii(text)
    assert f"before {MARK}" in left, "it is shown, not swallowed"
    ours = re.compile(rf"(drumline:|\d\d:\d\d:\d\d|  try:) {MARK}")
    assert not [line for line in left.splitlines() if ours.match(line)], left


# What somebody else wrote, and where it is printed. Each returns what reached the terminal.

Source = Callable[[str, Path, pytest.CaptureFixture[str]], str]
SOURCES: dict[str, Source] = {}


def source(function: Source) -> Source:
    SOURCES[function.__name__.replace("_", " ")] = function
    return function


def printed_by_cli(error: Exception, capsys: pytest.CaptureFixture[str], *, code: int) -> str:
    """An error that ends a command."""

    def fail(arguments: list[str]) -> int:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_dispatch", fail)
        assert cli.main(["verify"]) == code
    return capsys.readouterr().err


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def on_screen(act: Callable[[Controller], Any], path: Path) -> str:
    """What a launch over ssh shows, whose hosts are a and b."""
    hosts = [Host("a"), Host("b")]
    job = HostsJob(
        job="j",
        hosts=hosts,
        nodes=nodes_of_hosts(hosts, 1, [NodePlan()] * len(hosts)),
        program=Program(("train.py",)),
        client=["ssh"],
        python="python",
        cwd=Path("/code"),
        logs=Path("logs"),
        environment={},
        grace_s=1,
    )

    async def play(screen: Screen) -> None:
        act(Controller(job, screen))

    with (path / "screen").open("wb") as file:
        screen = Screen(file.fileno(), file.fileno())
        asyncio.run(play(screen))
        screen.close()
    return (path / "screen").read_bytes().decode()


def hear(remote: Remote, kind: str, **content: Any) -> None:
    remote.connection.on_frame = remote._receive
    remote.connection._receive(json.dumps({"kind": kind, **content}).encode())


@source
def line_of_a_rank_over_ssh(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    def act(controller: Controller) -> None:
        hear(controller.remotes[0], "lines", rank=0, shown_rank=0, stream="out", lines=[text])

    return on_screen(act, path)


@source
def log_of_a_rank_on_a_host(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (path / "log").write_bytes(text.replace("\r", "").encode(errors="surrogateescape") + b"\n")

    def act(controller: Controller) -> None:
        hear(
            controller.remotes[0],
            "lines",
            rank=0,
            shown_rank=0,
            stream="err",
            lines=LogFollower(path / "log").read(),
        )

    return on_screen(act, path)


@source
def refusal_of_a_supervisor(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    def act(controller: Controller) -> None:
        hear(controller.remotes[0], "refused", problems=[[text, text]])
        assert conclude(controller) == 3

    return on_screen(act, path)


@source
def diagnosis_from_a_host(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    def act(controller: Controller) -> None:
        controller.diagnoses.waiting = text
        controller.diagnoses.print_waiting()

    return on_screen(act, path)


@source
def last_words_of_a_rank(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    def act(controller: Controller) -> None:
        for rank, remote in enumerate(controller.remotes):
            hear(remote, "hello", host=remote.name, protocol=PROTOCOL)
            hear(remote, "started", ranks=[rank], world_size=2, start=0, restarts_left=0)
        failed = {"rank": 0, "code": 1, "failed_at": 1.0, "restarts_left": 1, "error": text}
        hear(controller.remotes[0], "failed", last_lines=[text], **failed)
        hear(controller.remotes[0], "ended", code=1, last_lines=[text])
        assert conclude(controller) == 1

    return on_screen(act, path)


@source
def banner_of_an_ssh_server(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return printed_by_cli(
        not_reached(Host("a"), 255, [text], python="python", cwd="/code"), capsys, code=3
    )


@source
def fact_of_a_rank_in_an_error(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.watch.fact_differences import Difference, described

    differences = [
        Difference("versions", text, ["1", "2"]),
        Difference("versions", "b", [text, "2"]),
    ]
    what, step = described(differences, ["a", "b"])
    return printed_by_cli(PreflightError(what, next_step=step), capsys, code=3)


@source
def exception_of_a_rank(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.base.errors import Place
    from drumline.training.failure_report import _print_once

    try:
        raise ValueError(text) from KeyError(text)
    except ValueError as error:
        error.add_note(text)
        _print_once(
            error, Place("a", 0, 3), None, path / "no folder" / "log", run=path, environment={}
        )
    return capsys.readouterr().err


@source
def exception_of_a_rank_on_another_host(
    text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    from drumline.base.errors import Place
    from drumline.rank.failure import Failure
    from drumline.training.failure_report import _print_once

    first = Failure(Place("b", 1, 3), text, 1)
    log = path / "no folder" / "log"
    _print_once(ValueError("x"), Place("a", 0), first, log, run=path, environment={})
    return capsys.readouterr().err


@source
def failure_of_another_rank_in_a_loop_of_the_users(
    text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    from drumline.base.errors import Place
    from drumline.rank.failure import Failure
    from drumline.training.manager import RunManager

    ddp = RunManager()
    error = ValueError("x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ddp.connection, "claim_failure", lambda *_, **__: Failure(Place("b", 1), text, 1)
        )
        with pytest.raises(SystemExit) as caught:
            ddp.__exit__(ValueError, error, None)
    return str(caught.value.code)


@source
def sentence_of_a_sidecar(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.watch.sidecar.sidecar_options import SidecarOptions
    from drumline.watch.sidecar.sidecar_reporter import SidecarReporter

    options = SidecarOptions(
        folder="", owns_folder=False, node=0, host="a", ranks=(0,), world_size=1
    )
    SidecarReporter(options).print(text)
    return capsys.readouterr().err


@source
def page_of_a_diagnosis(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.watch.cluster_state import ClusterState, NodeState
    from drumline.watch.diagnosis.diagnosis import Alarm, Cause, Diagnosis, RaisedAlarm
    from drumline.watch.diagnosis.diagnosis_files import diagnosis_text

    diagnosis = Diagnosis(
        cause=Cause.UNKNOWN,
        host=text,
        rank=None,
        step=None,
        what=text,
        next_step="look",
        is_certain=True,
        since_s=1.0,
    )
    picture = ClusterState(me=0, nodes=(NodeState(node=0, host="a", ranks=(), kernel=(text,)),))
    raised = RaisedAlarm(alarm=Alarm.HANG, diagnosis=diagnosis, action="report")
    return diagnosis_text(raised, picture, unix_s=0.0)


@source
def wait_for_a_host(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    WaitNotice(first_s=0).report(text)
    return capsys.readouterr().err


@source
def warning_in_a_loop_of_the_users(
    text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """No handler is set up there: logging's own prints it."""
    import logging

    from drumline.watch import fact_differences

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("drumline"), "propagate", False)
        fact_differences.log.warning(text)
    return capsys.readouterr().err


@source
def event_in_the_plain_display(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return display(PlainDisplay, text)


@source
def event_in_the_live_display(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return display(LiveDisplay, text)


def display(kind: Any, text: str) -> str:
    stream = io.StringIO()
    shown = kind(stream)
    stamp = {"time": 1000.0, "number": 3, "rank": 0, "host": "a", "step": 0}
    numbers = {
        "world_size": 1,
        "model_parameters": 1,
        "train_samples": 1,
        "eval_samples": 1,
        "batch_size": 1,
    }
    numbers |= {"batch_size_per_rank": 1, "accumulate": 1, "lr": 0.1, "epochs": 1, "total_steps": 1}
    names = {"task": text, "device": "cpu", "backend": "gloo", "precision": "fp32", "run": text}
    shown({"kind": "start", **stamp, **numbers, **names})
    for name in ("warning", "note", "straggler", "stall"):
        shown({"kind": name, **stamp, "message": text})
    shown({"kind": "resume", **stamp, "path": text})
    shown.close()
    return stream.getvalue()


@source
def fact_of_a_host_in_the_doctor(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return doctor(text, capsys, is_terminal=False)


@source
def fact_of_a_host_in_the_doctor_on_a_terminal(
    text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """Wide enough that rich folds nothing."""
    return doctor(text, capsys, is_terminal=True)


def doctor(text: str, capsys: pytest.CaptureFixture[str], *, is_terminal: bool) -> str:
    finding = Finding(level="problem", check="x", where=text, what=text, fix=text)
    hosts = [HostRecord(name, name) for name in (text, f"[link=https://example.org]{text}[/link]")]
    survey = Survey(hosts, 29500)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("FORCE_COLOR", "1")
        report([finding], survey=survey, notes=[text], is_terminal=is_terminal)
    return capsys.readouterr().out


@source
def file_in_a_run_folder(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.cli import verify_command

    part = Section("events", summary=text)
    part.problem(text, text)
    part.note(text, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_command, "find_run", Path)
        patch.setattr(
            verify_command, "verify_run", lambda folder, show: RunReport(folder, [part], text, None)
        )
        assert verify_command.run([str(path)]) == 1
    return capsys.readouterr().out


def status(text: str, path: Path) -> Path:
    rank = {
        "rank": 0,
        "host": text,
        "step": 1,
        "phase": "failed",
        "age_s": 0.0,
        "rate": 1.0,
        "state": "S",
    }
    row = {**rank, "cpu": 0.0, "exit": None, "failure": text}
    record = {
        "version": 3,
        "time": 0.0,
        "leader": text,
        "world_size": 1,
        "hang_s": None,
        "ranks": [row],
    }
    (path / "watch").mkdir()
    lost = [{"node": 1, "host": text, "ranks": [1], "no_heartbeat_s": 1.0, "how": text}]
    notices = [{"kind": "hang", "message": text}, {"kind": "stall", "message": text}]
    record |= {"lost": lost, "notices": notices, "step_times": None, "has_ended": True}
    (path / "watch/status.json").write_text(json.dumps(record))
    (path / "events").mkdir()
    error = {"kind": "error", "step": 1, "time": 0.0, "message": text}
    (path / "events/rank-00000.jsonl").write_text(json.dumps(error) + "\n")
    return path


@source
def status_in_watch(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return run_cli(capsys, "watch", str(status(text, path)), "--once", code=0)


@source
def status_in_watch_on_a_terminal(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.cli.watch_command import follow_on_screen

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "5000")
        patch.setenv("LINES", "100")
        assert follow_on_screen(RunStatusReader(status(text, path)), 0.1) == 0
    return capsys.readouterr().out


@source
def section_of_a_toml_file(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    quoted = json.dumps(text.encode(errors="replace").decode())
    (path / "a.toml").write_text(f"[{quoted}]\n{quoted} = 1\n[optim]\n{quoted} = {quoted}\n")
    return run_cli(capsys, "train", "digits", "--config", str(path / "a.toml"), code=2)


@source
def name_in_a_pickle_of_a_dataset(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.base.errors import DataError
    from drumline.data.cifar10 import cifar10

    name = text.encode("ascii", errors="replace").replace(b"\\", b"\\\\").replace(b"\n", b" ")
    (path / "test_batch").write_bytes(b"c" + name + b"\nname\n.")
    with pytest.raises(DataError) as caught:
        cifar10(split="eval", dir=str(path), augment=False)
    return printed_by_cli(caught.value, capsys, code=3)


@source
def line_of_a_hostfile(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (path / "hosts").write_text(f"a slots={text.encode(errors='replace').decode()}\nb slots=0\n")
    with pytest.raises(Exception, match="problem") as caught:
        hosts_from_file(path / "hosts")
    return printed_by_cli(caught.value, capsys, code=2)


@source
def name_of_a_file_in_lint(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = path / f"{text.replace('/', '')}.py"
    file.write_text("def (\n")
    return run_cli(capsys, "lint", str(file), code=2)


@source
def settings_in_a_proof(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from drumline.cli.prove_resume_command import print_line

    print_line(text)
    return capsys.readouterr().out


@source
def mistake_of_ours(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """An exception that nobody expected ends a command with its traceback."""
    return printed_by_cli(RuntimeError(text), capsys, code=1)


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("name", SOURCES)
def test_no_text_of_others_steers_the_terminal(
    name: str, escape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_harmless(SOURCES[name](f"before {MARK}{ESCAPES[escape]} after", tmp_path, capsys))


def test_ranks_keep_their_colours_which_end_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    painted = "\x1b[1;31mred\x1b[38;2;1;2;3m \x1b[4:3mcurly"
    assert (
        SOURCES["line of a rank over ssh"](painted, tmp_path, capsys) == f"[a 0] {painted}\x1b[0m\n"
    )
    assert r"\x1b[1;31mred" in SOURCES["diagnosis from a host"](painted, tmp_path, capsys)


def test_a_rank_cannot_pass_for_another_over_ssh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(controller: Controller) -> None:
        for rank in ("0] x\ndrumline: y\n[b 1", 0):
            hear(
                controller.remotes[0],
                "lines",
                rank=rank,
                shown_rank=rank,
                stream="out",
                lines=["z\n[b 1] z"],
            )

    assert on_screen(act, tmp_path) == "[a 0] z\\n[b 1] z\n"


def test_markup_in_a_fact_of_a_host_makes_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    text = doctor("[bold]x[/bold]", capsys, is_terminal=True)
    assert "[link=https://example.org][bold]x[/bold][/link]" in text
    assert "\x1b]8" not in text


def test_a_diff_is_exact_for_programs_and_harmless_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.py"
    wrapped = "model = torch.nn.parallel.DistributedDataParallel(net)"
    save = f"torch.save(model.state_dict(), '{OSC_52}')"
    file.write_text(f"import torch\n{wrapped}\n{save}\n")
    cli.main(["lint", str(file), "--diff", "--select", "DL016"])
    assert OSC_52 in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli.main(["lint", str(file), "--diff", "--select", "DL016"])
    text = capsys.readouterr().out
    assert r"\x1b]52;c" in text
    assert not STEERS.search(OURS.sub("", text))
