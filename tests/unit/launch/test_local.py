"""How the end of a node's ranks is reported; that they are started and ended is tested in
`tests/cli`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.base.errors import ExitCode
from drumline.launch.node.local import exit_code_of, report_failure
from drumline.launch.node_plan import Program


def test_a_script_that_a_signal_ended(capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(3, -9, Program(("train.py",)), None)
    assert capsys.readouterr().err == (
        "drumline: train.py failed on rank 3 (killed by SIGKILL); the other ranks were stopped\n"
    )
    assert (exit_code_of(-9, is_task=False), exit_code_of(77, is_task=False)) == (1, 77)


def test_a_task_reports_its_failure_itself_unless_a_signal_ended_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(3, is_task=True) == ExitCode.PREFLIGHT_FAILED
    assert (
        exit_code_of(99, is_task=True) == exit_code_of(-9, is_task=True) == ExitCode.TRAINING_FAILED
    )
    task = Program(("train", "digits"), is_task=True)
    report_failure(0, 3, task, None, tmp_path)
    assert not [*tmp_path.iterdir()], "the sidecar may still report more"
    assert capsys.readouterr().err == ""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-00001.log").touch()
    report_failure(1, -9, replace(task, run=str(tmp_path)), None)
    report_failure(2, -15, task, None, tmp_path)
    report_failure(2, -15, task, None, tmp_path)  # as after the sidecar's report
    assert capsys.readouterr().err == (
        f"drumline: rank 1 was killed by SIGKILL; the others were stopped\n  try: read {tmp_path}/logs/rank-00001.log\n"
        "drumline: rank 2 was killed by SIGTERM; the others were stopped\n"
    )
