"""What is set before steps are captured."""

from __future__ import annotations

import os

import pytest

from drumline.engine.job import make_manager
from drumline.engine.steps.capture_stream import let_ranks_differ
from tests.jobs import make_config

VARIABLE = "NCCL_GRAPH_REGISTER"


def test_one_rank_may_capture_what_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    make_manager(make_config(step="compile"))
    assert VARIABLE not in os.environ
    make_manager(make_config(step="graph"))
    assert os.environ[VARIABLE] == "0"


def test_what_the_user_has_set_stays() -> None:
    environment = {VARIABLE: "1"}
    let_ranks_differ("auto", environment)
    assert environment == {VARIABLE: "1"}
