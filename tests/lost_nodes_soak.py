"""Nodes that are lost at every bad moment, while the others continue (`make soak-replicas`)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.base.errors import ExitCode
from tests.live_jobs import LIMIT_S, HeldNormalised, Nodes, nodes
from tests.ranks import free_port


def lose(job: Nodes, number: int, *others: int) -> list[Callable[[], None]]:
    """Start three nodes, and kill one after step 13; the others wait after step 22. Returns what
    lets them go."""
    first = number * job.per_node
    job.hold(first, 13)
    go = [job.hold(rank, 22) for rank in others]
    job.start(0, 1, 2)
    job.held(first, 13)
    job.kill(number)
    for rank in others:
        job.held(rank, 22)
    (job.run / f"hold-{first}-13").unlink()
    return go


def start_again(job: Nodes, number: int, go: list[Callable[[], None]]) -> None:
    job.start(number)
    job.until_printed(f"node {number} waits to join node {0 if number else 1} (")
    job.until_joiner_is_known()
    for release in go:
        release()


STREAMED = ("--dist.sync", "diloco:6", "--dist.sync_parts", "2", "--dist.sync_overlap", "2")


@pytest.mark.parametrize(
    "arguments", [(), STREAMED, ("--dist.outer_dtype", "int8")], ids=["plain", "parts", "int8"]
)
def test_killed_between_the_halves_of_a_round(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with nodes(tmp_path, 3, *arguments) as job:
        job.hold(2, "exchange")
        job.start(0, 1, 2)
        job.held(2, "exchange")
        job.kill(2)
        job.finish(0, 1)
    (lost,) = job.events("regrouped")
    assert lost["step"] in (3, 5)
    assert len(lost["nodes"]) == 2


def test_two_of_three_killed_at_once(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as job:
        for number in (1, 2):
            job.hold(number, 13)
        job.start(0, 1, 2)
        for number in (1, 2):
            job.held(number, 13)
        job.kill(1, 2)
        job.finish(0)
    assert len(job.events("regrouped")[-1]["nodes"]) == 1
    assert job.events("end")[0]["step"] == 40


def test_the_first_node_is_lost_and_joins_again(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, "--checkpoint.every_steps", "10", "--train.steps", "200") as job:
        start_again(job, 0, lose(job, 0, 1, 2))
        job.finish(0, 1, 2)
        assert job.events("end")[-1]["host"]
    assert [len(event["nodes"]) for event in job.events("regrouped")] == [2, 3]


@pytest.mark.parametrize("seed", range(6))
def test_killed_while_it_joins(tmp_path: Path, seed: int) -> None:
    """At once, or at some moment until it trains."""
    with nodes(tmp_path, 3, "--train.steps", "60") as job:
        start_again(job, 2, lose(job, 2, 0, 1))
        time.sleep(random.Random(seed).uniform(0, 1.5))
        job.kill(2)
        job.finish(0, 1)


def test_a_node_that_differs_does_not_join(tmp_path: Path) -> None:
    """Another setting is seen before the others pause, other data after that; its launcher would
    not start it again."""
    with nodes(tmp_path, 3, "--train.steps", "200") as job:
        go = lose(job, 2, 0, 1)
        arguments = job.arguments
        job.arguments = (*arguments, "--optim.lr", "0.2")
        job.start(2)
        job.processes[2][0].join(LIMIT_S)
        assert job.processes[2][0].exitcode == ExitCode.PREFLIGHT_FAILED, job.output()
        assert "and cannot join: the setting optim.lr: 0.2 here, 0.05 there" in job.output()
        job.arguments = arguments
        job.variables = {"MORE_SAMPLES": "1"}
        start_again(job, 2, go)
        job.processes[2][0].join(LIMIT_S)
        assert job.processes[2][0].exitcode == ExitCode.PREFLIGHT_FAILED, job.output()
        assert "node 2 could not join the others: ranks differ in the training data" in job.output()
        job.finish(0, 1)
    assert [len(event["nodes"]) for event in job.events("regrouped")] == [2, 2]


def test_data_of_unknown_length(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, "--train.steps", "60") as job:
        job.variables = {"STREAM": "1"}
        start_again(job, 2, lose(job, 2, 0, 1))
        # the ledger has the steps of the lost node, over the ends of epochs
        job.finish(0, 1, 2)
    starts = [
        json.loads(line)
        for line in (job.run / "ledger.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    assert [(start["samples"], start["step"], start.get("lost")) for start in starts[:2]] == [
        (None, 0, None),
        (None, 15, [[2, 11, 15]]),
    ]


@pytest.mark.parametrize(
    "order", [([2], [0, 1]), ([0, 1], [2])], ids=["the last one first", "two first"]
)
def test_a_preempted_node_leaves_and_all_of_them_save(
    tmp_path: Path, order: tuple[list[int], ...]
) -> None:
    with nodes(tmp_path, 3, "--train.steps", "1000000") as job:
        job.start(0, 1, 2)
        job.until(lambda: bool(job.events("train")), "the first log line")
        for numbers in order:
            for number in numbers:
                os.kill(job.pid(number), signal.SIGTERM)
            for number in numbers:
                job.processes[number][0].join(LIMIT_S)
                assert job.processes[number][0].exitcode == ExitCode.PREEMPTED, job.output()
        assert " received SIGTERM and leaves; the other nodes continue without it" in job.output()
        assert len(job.events("regrouped")[-1]["nodes"]) == len(order[1])
        (preempted,) = job.events("preempted")
        assert (job.run / f"checkpoints/step-{preempted['step']:08d}").exists()
        job.arguments = ("--train.steps", str(preempted["step"] + 10))
        job.start(0, 1, 2)  # resumes
        job.finish(0, 1, 2)


@pytest.mark.parametrize("seed", range(4))
def test_random_kills(tmp_path: Path, seed: int) -> None:
    """Any node but one at a time, again and again; each is started again."""
    draw = random.Random(seed)
    with nodes(tmp_path, 3, "--train.steps", "3000", "--checkpoint.every_steps", "50") as job:
        job.start(0, 1, 2)
        job.until(lambda: bool(job.events("train")), "the first log line")
        for _ in range(5):
            time.sleep(draw.uniform(0.3, 2.0))
            number = draw.randrange(3)
            count = len(job.events("regrouped"))
            job.kill(number)
            job.start(number)
            job.until(lambda: len(job.events("regrouped")) > count, "another group")  # noqa: B023
            job.until(lambda: len(job.events("regrouped")[-1]["nodes"]) == 3, "three nodes")
        job.finish(0, 1, 2)


def test_replicas_of_sharded_models(tmp_path: Path) -> None:
    """hsdp: the step that fails is repeated by the others, and a node that joins gets the shards of
    another."""
    flags = (
        "--dist.mode",
        "hsdp",
        "--dist.sync",
        "step",
        "--optim.name",
        "adamw",
        "--train.steps",
        "300",
    )
    with nodes(tmp_path, 3, *flags, per_node=2) as job:
        start_again(job, 2, lose(job, 2, 0, 1, 2, 3))
        job.finish(0, 1, 2)
    lost, joined = job.events("regrouped")
    assert (lost["step"], len(lost["nodes"])) == (13, 2)
    assert len(joined["nodes"]) == 3
    assert job.events("end")[0]["metrics"]["accuracy"] > 0.8


@pytest.mark.parametrize("place", ["exchange", 13], ids=["in a round", "between rounds"])
def test_buffers_of_replicas_of_two_ranks(tmp_path: Path, place: int | str) -> None:
    """BatchNorm in replicas that are nodes; those that are left have the same shared buffers, which
    are compared."""
    flags = ("--dist.sync_within", "node", "--data.samples", "60")
    with nodes(tmp_path, 3, *flags, per_node=2, task=HeldNormalised) as job:
        job.hold(4, place)
        job.start(0, 1, 2)
        job.held(4, place)
        job.kill(2)
        job.finish(0, 1)
    (lost,) = job.events("regrouped")
    assert len(lost["nodes"]) == 2
    assert job.events("end")[0]["step"] == 40


def test_real_launchers_of_nodes_with_two_ranks(tmp_path: Path) -> None:
    """kill -9 of a rank: its launcher restarts the ranks of that node alone, and they join the
    others."""
    job = Nodes(tmp_path, 3)
    port = free_port()
    words = ["--dist.sync_within", "node", "--train.steps", "400", "--watch.sidecar", "auto"]
    launchers = []
    go = [job.hold(rank, 100) for rank in (0, 1, 4, 5)]
    for number in range(3):
        command = [
            sys.executable, "-m", "drumline", "launch", "--nodes", "3", "--node-rank", str(number), "--procs", "2",
            "--master", f"127.0.0.1:{port}", "tests/live_jobs.py:Held", "--run", str(job.run), *words,
            "--dist.on_lost_node", "continue",
        ]  # fmt: skip
        with (tmp_path / f"output-{number}").open("w") as output:
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "DRUMLINE_SECRET": "0123456789abcdef" * 2,
            }
            launchers.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            )
    try:
        job.until(lambda: bool(job.events("train")), "the first log line")
        before = {rank: job.pid(rank) for rank in range(6)}
        os.kill(before[3], signal.SIGKILL)
        job.until_printed("node 1 waits to join node 0 (")
        job.until_joiner_is_known()
        for release in go:
            release()
        job.until(
            lambda: any(event["joined"] for event in job.events("regrouped")),
            "the node joins again",
        )
        assert [launcher.wait(LIMIT_S) for launcher in launchers] == [0, 0, 0], job.output()
    finally:
        for launcher in launchers:
            launcher.kill()
    after = {rank: job.pid(rank) for rank in range(6)}
    assert [rank for rank in before if before[rank] != after[rank]] == [2, 3]
    assert (
        "restarting the ranks (restart 1 of 3); they join the other nodes after a round"
        in job.output()
    )
