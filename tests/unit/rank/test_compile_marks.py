"""What a heartbeat shows while torch compiles: with torch's own callbacks, without its compiler,
which loads slowly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drumline.rank.watched.job_connection import CompileMarks, JobConnection
from drumline.watch.heartbeat import HeartbeatWriter, Phase


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    file = Path(torch.__file__).parent / "_dynamo" / "callback.py"
    spec = importlib.util.spec_from_file_location("callbacks_of_torch", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # for its dataclasses
    monkeypatch.setitem(sys.modules, "callbacks_of_torch", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    return module


def test_a_compilation_is_a_phase_inside_another_and_its_step_is_remembered(
    callbacks: ModuleType,
) -> None:
    heartbeat = HeartbeatWriter()
    heartbeat.begin_step(812)
    heartbeat.mark(Phase.FORWARD)
    handler = callbacks.callback_handler
    marks = CompileMarks(heartbeat, handler)
    marks.attach()
    marks.attach()
    trigger = callbacks.CallbackTrigger
    assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1
    with handler.install_callbacks(trigger.DYNAMO, "0/1"):
        assert heartbeat.phase == Phase.COMPILE
        with handler.install_callbacks(trigger.DYNAMO, "1/0"):
            assert heartbeat.phase == Phase.COMPILE
    assert heartbeat.phase == Phase.FORWARD
    heartbeat.mark(Phase.EVALUATION)
    # in evaluation mode, which is no step
    with handler.install_callbacks(trigger.DYNAMO, "2/0"):
        assert heartbeat.phase == Phase.COMPILE
    assert marks.began_at == {"0/1": 812}
    assert heartbeat.num_marks == 2
    marks.detach()
    assert handler.start_callbacks == handler.end_callbacks == []


def test_a_rank_attaches_when_the_compiler_is_loaded_and_again_after_a_reset(
    callbacks: ModuleType,
) -> None:
    connection = JobConnection()
    handler = callbacks.callback_handler
    for _ in range(2):
        connection.mark_compilations()
        assert len(handler.start_callbacks) == 1
        handler.clear()  # as torch._dynamo.reset() does
    connection.mark_compilations()
    connection.close()
    assert handler.start_callbacks == []
    assert connection.compilations is None
