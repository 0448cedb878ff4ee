"""Files of settings from somebody else: env files, TOML, hostfiles, JSON, and words for Kubernetes
and git."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import DrumlineError, UsageError
from drumline.base.untrusted import DOCUMENT_BYTES, TEXT_BYTES, parse_json, parse_toml, read_regular
from drumline.config.config_file import read_config_file
from drumline.launch.env_file import _unquoted, read_env_file
from drumline.launch.hosts import hosts_from_file, read_counts
from drumline.launch.ssh.sync import code_files
from drumline.launch.templates import _literal
from drumline.net.frames import FrameError, decode
from drumline.report.verify.run_check import verify_run
from drumline.runs import events
from drumline.runs.events import Event, Reporter, parse_line, read_json_lines
from drumline.runs.run_folder import RunFolder
from drumline.tools.doctor.machine.folder_hashes import FileEntry, _code_hash
from drumline.training.output import WatchNotices
from drumline.watch.run_status import RunStatusReader
from drumline.watch.status_file import read_status_file
from tests.attacks.limits import bounded

READ = (
    "import sys; from pathlib import Path; from drumline.base.untrusted import read_regular; "
    "print(read_regular(Path(sys.argv[1]), follow_links=True))"
)
HARD_JSON = {
    "deep lists": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "deep, and closed": "[" * 5000 + "]" * 5000,
    "6,000 digits": '{"step": ' + "7" * 6000 + "}",
    "4,000 digits": '{"step": ' + "7" * 4000 + "}",
    "a string that does not end": '["' + '\\"' * 200_000 + "[" * 300,
    "brackets in text": "[" * 201 + '"' + "]" * 201 + '"',
}
HARD_TOML = {
    "deep lists": "a = " + "[" * 200_000,
    "deep tables": "a = " + "{a=" * 200_000,
    "a key of 100,000 parts": "a." * 100_000 + "a = 1",
    "a section of 100,000 parts": "[" + '"a" . ' * 100_000 + "a]",
    "6,000 digits": "[train]\nseed = " + "7" * 6000,
    "6,000 hexadecimal digits": "[train]\nseed = 0x" + "7" * 6000,
    "100,000 spaces": "a = '''\n" + " " * 100_000 + "\n'''",
    "100,000 spaces in a key": "a" + " " * 100_000 + "b",
}


@pytest.mark.parametrize("name", HARD_JSON)
def test_json_is_decoded_within_limits(name: str) -> None:
    text = HARD_JSON[name]
    with bounded():
        with pytest.raises(
            ValueError,
            match=r"nested deeper than 200 levels|a number has more than 300 digits|line 1",
        ):
            parse_json(text)
        assert parse_line(text.encode()) is None
        with pytest.raises(FrameError):
            decode(text.encode())


def test_what_people_write_is_decoded() -> None:
    deep = json.loads("[" * 200 + "]" * 200)
    assert parse_json(json.dumps(deep)) == deep
    many = {"lists": [[1, -2.5, "][{", None, True, '\\"']] * 500, "number": 10**299}
    assert parse_json(json.dumps(many)) == many
    assert parse_toml("a.b.c = 0x10\n[d]\ne = [1, [2]]\n") == {
        "a": {"b": {"c": 16}},
        "d": {"e": [1, [2]]},
    }


@pytest.mark.parametrize("name", HARD_TOML)
def test_a_settings_file_is_read_within_limits(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.toml").write_text(HARD_TOML[name])
    with bounded():
        layer = read_config_file(tmp_path / "run.toml")
    assert layer.problems
    assert all(len(problem) < 1000 for problem in layer.problems)


ENV_LINES = {
    "backslashes": 'A="' + "\\" * 100_000,
    "backslashes in single quotes": "A='" + "\\" * 100_000,
    "escapes that do not end": 'A="' + "\\a" * 50_000 + "x",
    "spaces": "A=" + " " * 100_000 + "x" + " " * 100_000 + "y",
    "spaces behind quotes": 'A="x"' + " " * 100_000 + "y",
    "a long name": "A" * 500_000,
}


@pytest.mark.parametrize("name", ENV_LINES)
def test_an_env_file_is_read_in_linear_time(tmp_path: Path, name: str) -> None:
    (tmp_path / ".env").write_text(ENV_LINES[name])
    with bounded(), pytest.raises(UsageError, match="missing: NUMBER_OF_NODES"):
        read_env_file(tmp_path / ".env")


@pytest.mark.parametrize(
    "value",
    [
        "x",
        "'a\\b'",
        "'a\\'",
        '"a\\"b"',
        '"a\\\\"',
        '"a # b" # c',
        "a # b",
        "a#b",
        "# b",
        "''",
        '"tab\\tx"',
    ],
)
def test_quotes_are_read_as_bash_reads_them(value: str) -> None:
    shell = subprocess.run(
        ["bash", "-c", f'A={value}\nprintf %s "$A"'], capture_output=True, check=True
    )
    expected = shell.stdout.decode().replace("\\t", "\t")
    assert _unquoted(value) == expected


@pytest.mark.parametrize("key", ["NUMBER_OF_NODES", "NODE_RANK", "NUMBER_OF_GPUS", "MASTER_PORT"])
def test_a_number_of_6000_digits_is_a_problem_of_the_file(tmp_path: Path, key: str) -> None:
    (tmp_path / ".env").write_text(f"{key}={'7' * 6000}\n")
    with pytest.raises(UsageError, match=f"{key} is '777"):
        read_env_file(tmp_path / ".env")


def test_a_hostfile_is_read_within_limits(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"a slots={'7' * 6000}\nb{' ' * 100_000}x\n")
    with bounded(), pytest.raises(UsageError, match="2 problems in the list of hosts"):
        hosts_from_file(tmp_path / "hosts")
    assert read_counts("7" * 6000) is None
    assert read_counts(f"1:{'7' * 6000}") is None


@pytest.mark.parametrize("read", [read_env_file, hosts_from_file, read_config_file])
def test_what_is_no_file_is_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"a=1\n" * 300_000)
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "large", "link"):
        with bounded():
            try:
                problems = " ".join(read(tmp_path / name).problems)
            except DrumlineError as error:
                problems = str(error)
        assert re.search(
            r"cannot be read: it (is a FIFO|is a device|has more than 524,288 bytes)", problems
        )


def test_files_at_their_limit_take_a_moment(tmp_path: Path) -> None:
    """Of many small values, which cost the most; a quarter of what may come."""
    (tmp_path / "json").write_bytes(b"[" + b"[]," * (DOCUMENT_BYTES // 12 - 1) + b"0]")
    (tmp_path / "toml").write_bytes(b"a = [" + b"1," * (TEXT_BYTES // 8 - 4) + b"]")
    with bounded(cpu_s=5.0, megabytes=300):
        parse_json(read_regular(tmp_path / "json"))
    with bounded():
        parse_toml(read_regular(tmp_path / "toml", most=TEXT_BYTES).decode())
    os.truncate(tmp_path / "json", DOCUMENT_BYTES + 1)
    with pytest.raises(OSError, match="it has more than 8,388,608 bytes"):
        read_regular(tmp_path / "json")


def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    """`--env-file <(decrypt secrets)`."""
    command = f"{sys.executable} -c {shlex.quote(READ)} <(echo TOKEN=x)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "b'TOKEN=x\\n'\n", done.stderr


def test_a_settings_file_may_be_a_link_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text("[train]\nseed = 3\n")
    (tmp_path / "link.toml").symlink_to("real.toml")
    assert read_config_file(tmp_path / "link.toml").settings["train.seed"].value == 3


# What is found in a run folder


@pytest.mark.parametrize(
    "text", [*HARD_JSON.values(), *HARD_TOML.values(), "\0", "7", "{}", '{"kind": []}']
)
def test_verify_reads_any_run_folder(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.make()
    for file in (
        run.config_file,
        run.environment_file,
        run.ledger,
        run.event_file(0),
        run.event_file(1),
    ):
        file.write_text(text + "\n")
    with bounded(cpu_s=3):
        assert verify_run(tmp_path, lambda _: None).problems


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_verify_waits_for_nothing(tmp_path: Path, kind: str) -> None:
    run = RunFolder(tmp_path)
    run.make()
    for file in (run.config_file, run.environment_file, run.ledger, run.event_file(0)):
        os.mkfifo(file) if kind == "fifo" else file.symlink_to(kind)
    with bounded():
        problems = verify_run(tmp_path, lambda _: None).problems
    named = {finding.where for finding in problems}
    assert named >= {"config.toml", "environment.json", "events/rank-00000.jsonl", "ledger.jsonl"}


def test_a_line_without_end_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LINE_BYTES", 1 << 20)
    with (tmp_path / "lines").open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(64 << 20)  # a hole: zeros
        file.seek(0, 2)
        file.write(b'\n{"b": 2}\n')
    with bounded(megabytes=32):
        lines = list(read_json_lines(tmp_path / "lines"))
    assert [(line.number, line.record) for line in lines] == [
        (1, {"a": 1}),
        (2, None),
        (3, {"b": 2}),
    ]
    assert lines[1].is_ended


STATUS = {
    "version": 3,
    "time": 1.0,
    "leader": "",
    "world_size": 1,
    "hang_s": None,
    "ranks": [],
    "lost": [],
    "notices": [],
    "step_times": None,
    "has_ended": False,
}


@pytest.mark.parametrize(
    "change",
    [
        *({"time": value} for value in ("now", None, [], True)),
        *({"ranks": value} for value in (7, None, "x", {"a": 1}, [7], [{}])),
        *({"world_size": value} for value in ("x", None, [])),
        *({"lost": value} for value in (7, [7], [{"host": 1}])),
        *({"notices": value} for value in (7, [7], [{"kind": "hang"}])),
        {"hang_s": "x"},
        {"leader": 7},
    ],
)
def test_a_forged_status_is_no_status(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "watch").mkdir()
    file = tmp_path / "watch" / "status.json"
    file.write_text(json.dumps(STATUS))
    assert read_status_file(file) is not None
    file.write_text(json.dumps({**STATUS, **change}))
    assert read_status_file(file) is None
    assert RunStatusReader(tmp_path).read().status is None


def test_notices_of_other_types_are_left_out(tmp_path: Path) -> None:
    notices = WatchNotices(tmp_path)
    (tmp_path / "notices.jsonl").write_text(
        '{"kind": [], "message": 7}\n{"kind": "stall", "message": {}}\n'
    )
    reported: list[Event] = []
    notices.report(Reporter([reported.append], rank=0, host="a"))
    assert reported == []


def test_watch_and_doctor_wait_for_no_fifo(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    os.mkfifo(run.event_file(0))
    with bounded():
        assert RunStatusReader(run.path).read().last_event is None
        assert _code_hash(FileEntry("rank-0", str(run.event_file(0)), 0)) == "unread"


# Words that others expand


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it (third_party/forked/golang/expansion): `$$` is `$`, `$(X)` a variable
    that is known."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]),
        text,
    )


@pytest.mark.parametrize(
    "word", ["$(X)", "$$(X)", "$$$(X)", "$$", "$", "a$b", "$X", "$(", "x$(X)$$(X)y"]
)
def test_kubernetes_expands_nothing_that_the_user_wrote(word: str) -> None:
    assert expanded(_literal(word), {"X": "secret"}) == word


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_hostile_repository_runs_nothing(tmp_path: Path) -> None:
    """`--sync` asks git which files are code."""
    trap = tmp_path / "trap"
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "evil.sh").write_text(f"#!/bin/sh\ntouch {trap}\n")
    (repository / "evil.sh").chmod(0o755)
    git = ["git", "-C", str(repository)]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "config", "core.fsmonitor", str(repository / "evil.sh")], check=True)
    subprocess.run([*git, "config", "core.hooksPath", str(repository)], check=True)
    assert code_files(repository) == ["evil.sh"]
    assert not trap.exists()
    subprocess.run([*git, "ls-files", "--others"], check=True, capture_output=True)
    assert trap.exists()  # the trap would have worked
