"""Several processes find what one finds, and what a killed one would have found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from drumline_lint.command import main
from drumline_lint.parallel_work import in_processes

CODE = """\
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    dist.barrier()
"""


def test_the_outcomes_are_in_order_and_from_several_processes() -> None:
    outcomes = in_processes(lambda part: (part, os.getpid()), [1, 2, 3])
    assert [part for part, _ in outcomes] == [1, 2, 3]
    assert len({process for _, process in outcomes}) >= 2
    assert outcomes[0][1] == os.getpid()


def test_the_part_of_a_killed_process_is_done_here() -> None:
    here = os.getpid()

    def work(part: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return part

    assert in_processes(work, [1, 2]) == [1, 2]


def test_the_findings_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("drumline_lint.linter.FEW_FILES", 1)
    for name in "abcde":
        (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "f.py").write_text("import a\n")
    (tmp_path / "g.py").write_text("import a\nimport b\n(\n")
    outputs = set()
    for jobs in ("1", "2", "auto", "99"):
        assert main([".", "--no-cache", "--format", "json", "--jobs", jobs]) == 2
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1
    output = outputs.pop()
    assert output.count('"rule": "DL017"') == 5
    assert output.count('"rule": "DL000"') == 1


@pytest.mark.parametrize("jobs", ["0", "-1", "many", "1.5"])
def test_wrong_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path, jobs: str) -> None:
    assert main([str(tmp_path), f"--jobs={jobs}"]) == 2
    error = capsys.readouterr().err
    assert error == f"drumline-lint: error: --jobs {jobs}: give a number from 1 on, or auto\n"
