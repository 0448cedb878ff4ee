"""What an agent and its guard do with signals that come at an odd moment, and with what was left
before."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from drumline.launch.node import agent as agent_module
from drumline.launch.node.agent import NodeAgent
from drumline.launch.node.guard import Guard, new_job
from drumline.launch.node.node_rendezvous import AgentRendezvous, Preempted
from drumline.launch.node.rank_exchange import RankFiles, RankSignals
from drumline.launch.node.rank_logs import rank_file
from drumline.launch.node_plan import NodePlan
from drumline.watch.watch_folder import WatchFolder, read_ending


def test_an_agent_that_is_preempted_during_the_rendezvous_starts_no_ranks() -> None:
    agent = NodeAgent.__new__(NodeAgent)
    agent.signals = RankSignals(list, AgentRendezvous(NodePlan()), is_task=True)
    agent.signals.preempt_signal = signal.SIGUSR1
    with pytest.raises(Preempted) as preempted:
        agent._start_workers(WorkerGroup.__new__(WorkerGroup))
    assert not preempted.value.has_saved
    with pytest.raises(Preempted) as preempted:
        agent.signals.raise_if_ranks_stopped(signal.SIGUSR1, is_save_reported=True)
    assert preempted.value.has_saved


def test_a_guard_outlives_the_signals_that_a_scheduler_sends_to_all_of_a_job() -> None:
    guard = Guard(new_job(), grace_s=0.1)
    try:
        status = Path(f"/proc/{guard._process.pid}/status")
        deadline = time.monotonic() + 20
        while not _ignores(status, signal.SIGTERM) or not _ignores(status, signal.SIGUSR1):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        guard.close(has_succeeded=True)


def _ignores(status: Path, number: signal.Signals) -> bool:
    (mask,) = [
        line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigIgn")
    ]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_rank_does_not_begin_with_the_number_of_an_earlier_launch(tmp_path: Path) -> None:
    stale = rank_file(tmp_path, 3, 0)
    stale.write_text("7")
    variables = {"RANK": "3", "TORCHELASTIC_ERROR_FILE": ""}
    RankFiles(str(tmp_path), tmp_path).reify({0: variables})
    assert variables["DRUMLINE_RANK_FILE"] == str(stale)
    assert not stale.exists()


@pytest.mark.parametrize("options", [{"timeout": 0.01}, {}], ids=["grace", "torch's own limit"])
def test_ranks_that_the_launcher_killed_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: dict[str, float]
) -> None:
    agent = NodeAgent.__new__(NodeAgent)
    agent._failed = True
    agent.watch = WatchFolder.__new__(WatchFolder)
    agent.watch.current = None
    agent._worker_group = WorkerGroup.__new__(WorkerGroup)
    agent._worker_group.workers = [Worker(local_rank=0, global_rank=3)]
    codes = iter([{0: None}, {0: -signal.SIGKILL}])
    monkeypatch.setattr(NodeAgent, "exit_codes", lambda _: next(codes))
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda *_, **__: time.sleep(0.02))
    monkeypatch.setattr(agent_module, "TORCH_GRACE_S", 0.01)
    agent._shutdown(signal.SIGTERM, **options)
    assert capfd.readouterr().err == (
        "drumline: rank 3 did not exit within 0.01 s after SIGTERM, so the launcher killed them\n"
        "  try: read the ends of the ranks' logs; at the end of a run --grace SECONDS gives them more time\n"
    )


def test_the_end_of_a_run_lets_ranks_save_though_a_node_was_lost_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11 gives no timeout there."""
    agent = NodeAgent.__new__(NodeAgent)
    agent.is_task = True
    agent.rendezvous = AgentRendezvous(NodePlan())
    agent.rendezvous.has_lost_node = True
    monkeypatch.setattr(NodeAgent, "exit_codes", lambda _: {})
    signals = []
    monkeypatch.setattr(
        LocalElasticAgent, "_shutdown", lambda _, death_sig, **__: signals.append(death_sig)
    )
    agent._shutdown()
    assert signals == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("has_lost_node", "has_failed", "grace_s", "why"),
    [
        (True, False, 0.0, "node 1 (b) restarted"),
        (False, False, 30.0, "node 1 (b) restarted"),
        (False, True, 30.0, ""),
    ],
    ids=["killed at once", "asked to exit", "another rank failed"],
)
def test_the_sidecar_learns_that_the_launcher_ends_the_ranks_and_why(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_lost_node: bool,
    has_failed: bool,
    grace_s: float,
    why: str,
) -> None:
    agent = NodeAgent.__new__(NodeAgent)
    agent.is_task = True
    agent._failed = has_failed
    agent.rendezvous = AgentRendezvous(NodePlan())
    agent.rendezvous.restart_reason = "node 1 (b) restarted"
    agent.rendezvous.has_lost_node = has_lost_node
    agent.watch = WatchFolder.__new__(WatchFolder)
    agent.watch.current = tmp_path
    monkeypatch.setattr(NodeAgent, "exit_codes", lambda _: {0: None})
    endings = []
    monkeypatch.setattr(
        LocalElasticAgent, "_shutdown", lambda *_, **__: endings.append(read_ending(tmp_path))
    )
    agent._stop_workers(WorkerGroup.__new__(WorkerGroup))
    (ending,) = endings
    assert ending is not None
    assert (ending.grace_s, ending.by, ending.why) == (grace_s, "launcher", why)
