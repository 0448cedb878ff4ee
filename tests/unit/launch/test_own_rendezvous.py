"""A launcher whose ranks find those of other nodes themselves waits for no other launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.cli.launch_request import LaunchRequest
from drumline.config import FlagValues
from drumline.launch.node.node_rendezvous import (
    AgentRendezvous,
    OwnRendezvous,
    open_rendezvous,
)
from drumline.launch.node_plan import NodePlan

CONTINUE = ["--dist.sync", "diloco:5", "--dist.on_lost_node", "continue"]


def test_each_node_starts_alone_and_all_ranks_have_one_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = [NodePlan(num_nodes=2, node_rank=rank, endpoint="192.0.2.1:29500") for rank in range(2)]
    opened = [open_rendezvous(node, "0123456789abcdef", continues=True) for node in nodes]
    # 192.0.2.1 is nobody: it would wait for that
    infos = [rendezvous.next_rendezvous() for rendezvous in opened]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 1), (0, 1)]
    places = [info.bootstrap_store_info for info in infos]
    assert [(place.master_addr, place.master_port) for place in places] == [
        ("192.0.2.1", 29500)
    ] * 2
    assert opened[0].ranks_secret == opened[1].ranks_secret != ""
    assert not any(
        rendezvous.use_agent_store or rendezvous.num_nodes_waiting() for rendezvous in opened
    )
    assert capsys.readouterr().err == ""
    without = open_rendezvous(nodes[0], None, continues=True)
    without.next_rendezvous()
    assert without.ranks_secret == ""
    assert "DRUMLINE_SECRET is not set: whoever reaches 192.0.2.1:29500" in capsys.readouterr().err
    alone = open_rendezvous(NodePlan(), None, continues=True)
    assert isinstance(alone, AgentRendezvous)
    assert not isinstance(alone, OwnRendezvous)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_later_attempt_of_the_launch_has_the_restarts_and_the_step_of_those_before(
    num_nodes: int,
) -> None:
    node = NodePlan(
        num_nodes=num_nodes,
        endpoint="192.0.2.1:29500",
        max_restarts=3,
        restarts_used=2,
        reached_step=40,
    )
    rendezvous = open_rendezvous(node, "0123456789abcdef", continues=True)
    assert rendezvous.restarts_used == 2
    assert (rendezvous.reached_step, rendezvous.counted_step) == (40, 40), (
        "a failure at step 40 is no progress"
    )


def test_the_launcher_reads_the_setting_from_flags_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert LaunchRequest(FlagValues(), "digits", CONTINUE).program().continues
    assert not LaunchRequest(FlagValues(), "digits", CONTINUE[:2]).program().continues
    Path("mine.toml").write_text('[dist]\nsync = "local:5"\non_lost_node = "continue"\n')
    assert LaunchRequest(FlagValues(), "digits", ["--config", "mine.toml"]).program().continues
    back = ["--config", "mine.toml", "--dist.on_lost_node", "restart"]
    assert not LaunchRequest(FlagValues(), "digits", back).program().continues
