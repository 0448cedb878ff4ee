"""When a command began: from the system, or from the launcher if that is plausible."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from drumline.base import rank_environment
from drumline.base.job_secret import SECRET_ENV, derived, new_secret
from drumline.base.rank_environment import (
    COMMAND_START,
    LOST_AFTER_S,
    ScriptWatch,
    WatchSettings,
    watch_settings_from,
)
from drumline.base.startup import command_start, now, process_start
from drumline.config.schema import WatchConfig
from drumline.launch.node.agent import NodeAgent
from drumline.launch.node.node_rendezvous import AgentRendezvous
from drumline.launch.node.rank_exchange import RankFiles
from drumline.launch.node_plan import NodePlan, Supervision
from drumline.watch.watch_folder import WatchFolder

TICK_S = 0.02


def test_a_process_knows_when_it_began() -> None:
    code = "from drumline.base.startup import process_start; print(process_start())"
    before = now()
    began = float(subprocess.check_output([sys.executable, "-c", code]))
    assert before - TICK_S <= began < now() - TICK_S, "before Python itself had started"


def test_a_launcher_sets_the_start_of_the_command() -> None:
    assert command_start({COMMAND_START: "1.25"}) == 1.25


def test_another_launcher_sets_no_start() -> None:
    assert command_start({}) is None
    assert command_start({COMMAND_START: ""}) is None, "of a restart"


@pytest.mark.parametrize(
    ("num_starts", "folder", "tells"), [(0, None, True), (1, None, False), (0, Path("logs"), False)]
)
def test_only_the_first_ranks_of_a_command_given_here_get_its_start(
    tmp_path: Path, num_starts: int, folder: Path | None, tells: bool
) -> None:
    agent = object.__new__(NodeAgent)  # without a job: only what it would tell
    agent.files = RankFiles(str(tmp_path), folder)
    agent.files.num_starts = num_starts
    agent.supervision = Supervision(folder=folder)
    agent.grace_s = 15.0
    agent.is_task = True
    agent.watch = WatchFolder("j")
    agent.rendezvous = AgentRendezvous(NodePlan())
    try:
        variables = agent._variables()
        assert variables[COMMAND_START] == (f"{process_start():.2f}" if tells else "")
        assert rank_environment.grace_from(variables) == 15.0
    finally:
        agent.watch.close()
        shutil.rmtree(str(agent.watch.root))


def test_a_host_is_lost_after_the_same_time_everywhere() -> None:
    assert WatchConfig().lost_s == LOST_AFTER_S, "the settings and the launcher"


def test_under_another_launcher_there_are_no_watch_settings() -> None:
    terms = watch_settings_from({})
    assert terms == WatchSettings()
    assert (terms.folder, terms.secret, terms.nodes) == (None, None, ())
    assert (terms.script.run, terms.script.on_hang, terms.script.hang_s) == (None, "restart", None)


def test_watch_settings_are_read_and_the_secret_is_not_shown() -> None:
    secret = new_secret()
    script = ScriptWatch(run="/runs/a", on_hang="stop", hang_s=7.5)
    terms = watch_settings_from(
        {
            rank_environment.WATCH_FOLDER: "/dev/shm/x",
            SECRET_ENV: secret,
            rank_environment.WATCH_NODES: "10.0.0.1:4000,fe80::1:4001",
            rank_environment.SCRIPT_WATCH: json.dumps(asdict(script)),
        }
    )
    assert terms == WatchSettings(
        folder=Path("/dev/shm/x"),
        secret=derived(secret, "sidecars"),
        nodes=(("10.0.0.1", 4000), ("fe80::1", 4001)),
        script=script,
    )
    assert terms.secret is not None
    assert terms.secret not in repr(terms)
