"""How the end of a node's ranks is told; that they are started and ended is looked at in `tests/cli`."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.errors import ExitCode
from drumline.launch.node.local import _explain, _explain_script


def test_a_script_that_a_signal_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert _explain_script(3, -9, "train.py") == 1
    assert capsys.readouterr().err == (
        "drumline: train.py failed on rank 3 (killed by SIGKILL); the other ranks were stopped\n"
    )
    assert _explain_script(0, 77, "train.py") == 77


def test_a_task_tells_itself_unless_a_signal_ended_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _explain(0, 3, None) is ExitCode.PREFLIGHT_FAILED
    assert _explain(0, 99, None) is ExitCode.TRAINING_FAILED
    assert capsys.readouterr().err == ""
    (tmp_path / "rank-00001.log").touch()
    assert _explain(1, -9, tmp_path) is ExitCode.TRAINING_FAILED
    assert _explain(2, -15, None) is ExitCode.TRAINING_FAILED
    assert capsys.readouterr().err == (
        f"drumline: rank 1 was killed by SIGKILL; the others were stopped\n  next: see {tmp_path}/rank-00001.log\n"
        "drumline: rank 2 was killed by SIGTERM; the others were stopped\n"
    )
