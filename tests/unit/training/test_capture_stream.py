"""What is set before steps are captured."""

from __future__ import annotations

import os

import pytest

from drumline.training.job.job import make_manager
from tests.jobs import make_config

VARIABLE = "NCCL_GRAPH_REGISTER"


def set_up(step: str) -> str | None:
    with make_manager(make_config(step=step)):
        return os.environ.get(VARIABLE)


def test_one_rank_may_capture_what_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert set_up("graph") == "1"  # the user's own
    monkeypatch.delenv(VARIABLE)
    assert set_up("compile") is None
    assert set_up("graph") == "0"
