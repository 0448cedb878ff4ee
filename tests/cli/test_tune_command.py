"""`drumline tune`: what it takes and refuses, its lines for a shell, and logs."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.base.errors import ExitCode
from drumline.cli import main, tune_command
from drumline.cli.tune_command import GROUPS
from tests.unit.tools.doctor.machines import healthy, network
from tests.unit.tools.tune.test_nccl_log import done, four_ranks, recorded, warn


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("--hosts a --hostfile f", ["--hosts and --hostfile exclude each other"]),
        ("--ssh x", ["--ssh: belongs to --hosts and --hostfile"]),
        ("--log --hosts a,b", ["--hosts: does not go with --log", "--log: no FILE was given"]),
        ("nccl.log", ["'nccl.log': unexpected argument; a log is given as --log FILE"]),
        ("--optim.lr 1", ["--optim.lr: is a setting of a run; tune takes none"]),
        ("--hoss a", ["did you mean"]),
        ("--log none.log", ["cannot read none.log: No such file or directory"]),
        ("--log .", ["cannot read .: Is a directory"]),
        (
            "--log README",
            ["no line of NCCL and no error in README", "run the job with NCCL_DEBUG=INFO"],
        ),
    ],
)
def test_wrong_usage_is_reported(
    words: str,
    problems: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README").write_text("nothing")
    assert main(["tune", *words.split()]) == ExitCode.USAGE
    printed = capsys.readouterr().err
    for problem in problems:
        assert problem in printed


def test_help_teaches_every_flag_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["tune", "--help"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for word in (
        *(f"\n  --{name}" for group in GROUPS.values() for name in group),
        "source cluster.sh",
        "NCCL_DEBUG=INFO",
        "1 a log shows",
    ):
        assert word in printed


def tune(monkeypatch: pytest.MonkeyPatch, *words: str, **facts: Any) -> int:
    monkeypatch.setattr(tune_command, "host_facts", lambda settings: healthy(**facts))
    return main(["tune", *words])


def test_a_machine_that_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [
        "# by drumline tune, for node-a",
        "# nothing to set: no finding of the doctor calls for a variable",
    ]


def test_what_is_printed_can_be_sourced_and_problems_are_comments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts: dict[str, Any] = {
        "torch": "2.9.1",
        "variables": {"NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "wlan7"},
    }
    facts |= {
        "gloo_interface": None,
        "interfaces": [network("lo", "127.0.0.1"), network("eth0", "10.0.0.1")],
    }
    assert tune(monkeypatch, **facts) == ExitCode.PREFLIGHT_FAILED
    printed = capsys.readouterr().out
    assert "# problem: node-a: torch 2.9.1 is older than 2.11\n#   fix: pip install" in printed
    shell = [
        "bash",
        "-euc",
        f"NCCL_P2P_DISABLE=1\n{printed}\necho ${{NCCL_P2P_DISABLE-none}} $GLOO_SOCKET_IFNAME",
    ]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "none eth0\n"
    assert tune(monkeypatch, "--json", **facts) == ExitCode.PREFLIGHT_FAILED
    document = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["value"], one["hosts"]) for one in document["variables"]] == [
        ("GLOO_SOCKET_IFNAME", "eth0", []), ("NCCL_P2P_DISABLE", None, []),
    ]  # fmt: skip
    assert [one["check"] for one in document["problems"]] == ["torch"]


def test_logs_are_read_from_files_and_from_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(recorded(f"sockets-rank{rank}.log")) for rank in range(2)]
    assert main(["tune", "--log", *files]) == 0
    printed = capsys.readouterr().out
    assert "NET/Socket over lo 127.0.0.1: 0 <-> 1" in printed
    assert printed.endswith("result: no problem in these logs, with 1 warning\n")
    fault = (four_ranks() + warn("gpu-01", 102, "Cuda failure 'out of memory'")).encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(fault)))
    assert main(["tune", "--log", "-", "--json"]) == ExitCode.SOMETHING_WRONG
    assert json.loads(capsys.readouterr().out)["findings"][0]["where"] == "rank 2 on gpu-01"


def test_what_a_log_says_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nccl.log").write_text(
        done("a", 1, 0, 1) + warn("a", 1, "\x1b]0;owned\x07 \x1b[2J")
    )
    assert main(["tune", "--log", str(tmp_path / "nccl.log")]) == ExitCode.SOMETHING_WRONG
    assert "\x1b" not in capsys.readouterr().out
