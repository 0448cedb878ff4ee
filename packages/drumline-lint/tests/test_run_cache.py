"""A run on the same files gives what the first one found, without running a rule; whatever may
change a finding is a new run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline_lint import command
from drumline_lint.command import main

CODE = """\
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    dist.barrier()
    dist.barrier()  # noqa: DL017
parser.add_argument("--local_rank")
"""


@pytest.fixture(name="here")
def work_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a finding, a silenced one, and a file that cannot be parsed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text("(")
    return tmp_path


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main([".", "--cache-dir", "kept", "--no-config", *arguments])
    return code, capsys.readouterr().out


def run_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(command, "run_rules")


def test_the_second_run_is_the_same_and_runs_no_rule(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = ("text", "json", "sarif", "github")
    first = {name: lint(capsys, "--no-cache", "--format", name) for name in formats}
    assert "DL017" in first["text"][1]
    assert "DL000" in first["text"][1]
    assert not (here / "kept").exists()
    lint(capsys)
    run_no_rules(monkeypatch)
    assert {name: lint(capsys, "--format", name) for name in formats} == first
    shown = lint(capsys, "--severity", "note")[1]
    assert "DL056" in shown, "what is shown is decided later"


@pytest.mark.parametrize("change", ["edited", "new", "renamed", "selected"])
def test_what_may_change_a_finding_is_a_new_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    lint(capsys)
    run_no_rules(monkeypatch)
    arguments = []
    if change == "edited":
        (here / "a.py").write_text(CODE.replace("get_rank", "get_node_local_rank"))
    elif change == "new":
        (here / "c.py").write_text("import a\n")
    elif change == "renamed":
        (here / "a.py").rename(here / "test_a.py")
    else:
        arguments = ["--select", "DL017"]
    code = main([".", "--cache-dir", "kept", "--no-config", *arguments])
    assert (code, "run_rules" in capsys.readouterr().err) == (2, True)


def test_a_damaged_entry_is_ignored(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = lint(capsys)
    (entry,) = (here / "kept").glob("*.json")
    document = json.loads(entry.read_text())
    for damaged in (
        "",
        "[]",
        "{}",
        json.dumps({**document, "findings": [{}]}),
        json.dumps({**document, "findings": [{**document["findings"][0], "place": {}}]}),
        json.dumps({**document, "unparsed": None}),
    ):
        entry.write_text(damaged)
        assert lint(capsys) == first


def test_a_folder_that_cannot_be_written_is_no_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = lint(capsys, "--no-cache")
    (here / "kept").write_text("a file")
    assert lint(capsys) == first
