"""A node is lost: the others continue without it, in the same processes, and it joins again from
their memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live_jobs import HeldNormalised, nodes


def test_the_others_continue_and_a_lost_node_joins_again(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, "--train.steps", "60") as job:
        job.hold(2, 13)
        go = [job.hold(number, 22) for number in (0, 1)]
        job.start(0, 1, 2)
        job.held(2, 13)
        job.kill(2)
        pids = [job.pid(number) for number in (0, 1)]
        for number in (0, 1):  # held until it is back
            job.held(number, 22)
        (job.run / "hold-2-13").unlink()
        job.start(2)
        job.until_printed("node 2 waits to join node 0 (")
        job.until_joiner_is_known()
        for release in go:
            release()
        job.finish(0, 1, 2)
        assert [job.pid(number) for number in (0, 1)] == pids

    lost, joined = job.events("regrouped")
    assert (lost["step"], lost["lost"], lost["joined"], len(lost["nodes"])) == (
        15,
        [lost["lost"][0]],
        [],
        2,
    )
    assert lost["lost"][0].startswith("node 2 (")
    assert lost["message"].startswith(
        f"{lost['lost'][0]} was lost by step 15; the others continue (paused "
    )
    assert (joined["lost"], len(joined["joined"]), len(joined["nodes"])) == ([], 1, 3)
    assert joined["step"] == 25
    text = f"{joined['joined'][0]} joined after step {joined['step']}, from the memory of the others (paused "
    assert joined["message"].startswith(text)
    starts = [
        json.loads(line)
        for line in (job.run / "ledger.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    assert [(start["step"], start["world_size"], start.get("lost")) for start in starts] == [
        (0, 3, None),
        (15, 2, [[2, 11, 15]]),
        (joined["step"], 3, None),
    ]
    assert job.events("end")[0]["step"] == 60


@pytest.mark.soak
def test_a_step_that_failed_has_changed_no_buffer(tmp_path: Path) -> None:
    """hsdp: the forward pass of the step in which a node is lost has updated BatchNorm's
    statistics, on each rank from samples of its own. The ranks are compared before the step is
    repeated."""
    flags = (
        "--dist.mode",
        "hsdp",
        "--dist.sync",
        "step",
        "--train.steps",
        "20",
        "--data.samples",
        "60",
    )
    with nodes(tmp_path, 3, *flags, per_node=2, task=HeldNormalised) as job:
        job.hold(4, 13)
        job.start(0, 1, 2)
        job.held(4, 13)
        job.kill(2)
        job.finish(0, 1)
    (lost,) = job.events("regrouped")
    assert (lost["step"], len(lost["nodes"])) == (13, 2)
    assert job.events("end")[0]["step"] == 20
