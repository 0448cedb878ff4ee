from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.base.startup import interrupted
from drumline.cli.launch_request import LaunchRequest
from drumline.config import FlagValues
from drumline.launch.env_file import EnvFile
from drumline.launch.hosts import Host
from drumline.launch.node_plan import (
    NodePlan,
    Program,
    nodes_of_hosts,
    task_program,
    torchrun_command,
)
from drumline.training.output import resume_command, two_node_command

FILE = EnvFile(NodePlan(), {"DDP_TIMEOUT_SECONDS": "60", "NCCL_DEBUG": "INFO"})


def line(node: NodePlan, program: Program) -> str:
    return shlex.join(torchrun_command(node, program))


def test_one_machine_needs_no_fixed_port() -> None:
    assert line(NodePlan(num_procs=2, max_restarts=3), Program(("my train.py", "--run", "x"))) == (
        "torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 "
        "--local-addr 127.0.0.1 -- 'my train.py' --run x"
    )


def test_the_rendezvous_is_at_the_first_host_by_the_name_it_was_given() -> None:
    hosts = [Host("me@a", 4), Host("b")]
    nodes = nodes_of_hosts(hosts, 29500, [NodePlan(num_procs=None)] * 2)
    program = task_program("digits", ["--train.epochs", "1"])
    assert [line(node, program) for node in nodes] == [
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 0 "
        "--rdzv-backend c10d --rdzv-endpoint a:29500 --rdzv-id drumline --rdzv-conf is_host=true --local-addr a "
        "-m -- drumline train digits --train.epochs 1",
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node gpu --max-restarts 0 "
        "--rdzv-backend c10d --rdzv-endpoint a:29500 --rdzv-id drumline --rdzv-conf is_host=false --local-addr b "
        "-m -- drumline train digits --train.epochs 1",
    ]
    assert [node.num_procs for node in nodes_of_hosts(hosts, 1, [NodePlan(num_procs=2)] * 2)] == [
        4,
        2,
    ]


def test_a_job_that_continues_with_fewer_nodes() -> None:
    hosts = [Host("a"), Host("b"), Host("c")]
    node = nodes_of_hosts(hosts, 1, [NodePlan(max_restarts=3, min_nodes=2)] * 3)[1]
    assert (node.min_nodes, node.peers) == (2, ("a", "b", "c"))
    node = replace(node, join_timeout_s=60, last_call_s=5, lost_after_s=30)
    assert line(node, Program(("x.py",))) == (
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2:3 --nproc-per-node 1 --max-restarts 3 "
        "--rdzv-backend c10d --rdzv-endpoint a:1 --rdzv-id drumline "
        "--rdzv-conf is_host=false,join_timeout=60,last_call_timeout=5,keep_alive_interval=10 "
        "--local-addr b -- x.py"
    )


def test_the_others_reach_the_first_node_at_the_endpoint() -> None:
    first = NodePlan(num_nodes=2, endpoint="node-a:29501")
    assert first.known_address == "node-a"
    assert replace(first, address="10.0.0.8").known_address == "10.0.0.8"
    assert replace(first, node_rank=1).known_address == NodePlan().known_address == ""


def test_values_of_the_file_become_flags_of_a_task_unless_the_user_set_them() -> None:
    defaults = replace(
        FILE, variables={**FILE.variables, "DATASET_DIR": "/data", "OUTPUT_DIR": "/runs"}
    ).task_defaults("digits")
    assert task_program("digits", [], *defaults).words == (
        *(
            "train",
            "digits",
            "--dist.train_timeout_s",
            "60",
            "--data.dir",
            "/data",
            "--run",
            "/runs/digits",
        ),
    )
    arguments = ["--run=here", "--data.dir", "mine"]
    assert task_program("digits", arguments, *defaults).words == (
        *("train", "digits", *arguments, "--dist.train_timeout_s", "60"),
    )
    assert task_program("digits", [], *FILE.task_defaults("digits")).words[2:] == (
        "--dist.train_timeout_s",
        "60",
    )


def test_only_what_resumes_by_itself_is_restarted() -> None:
    task = LaunchRequest(FlagValues(), "digits", [])
    script = LaunchRequest(FlagValues(), "train.py", [])
    assert (task.restarts(None), script.restarts(None)) == (3, 0)
    assert script.restarts(2) == 3, "who asks for that says that a restart helps"


@pytest.mark.parametrize(
    ("words", "procs", "resumes"),
    [
        (["digits", "--fresh", "--run", "my run"], 1, "digits --run 'my run'"),
        (["digits", "--procs", "2"], 2, "digits --procs 2"),
        (["--procs=2", "digits"], 2, "--procs=2 digits"),
        (["digits"], 2, "digits --procs 2"),  # the launcher had it
    ],
)
def test_resuming_is_the_same_command_without_fresh(
    words: list[str], procs: int, resumes: str
) -> None:
    assert resume_command(words, procs=procs) == f"drumline train {resumes}"


def test_after_an_interrupt_the_same_command_resumes_only_what_was_saved(tmp_path: Path) -> None:
    assert interrupted(None, ["digits"]) == (
        "interrupted; rerun the same command to resume from the newest checkpoint, if one was saved"
    )
    (tmp_path / "checkpoints" / ".step-00000005.partial").mkdir(parents=True)
    assert interrupted(tmp_path, ["digits", "--fresh"]) == (
        "interrupted before the first save; rerun the same command to start from the beginning"
    )
    (tmp_path / "checkpoints" / "step-00000005").mkdir()
    assert interrupted(tmp_path, ["digits"]) == (
        "interrupted; rerun the same command to resume from the newest checkpoint"
    )
    assert interrupted(tmp_path, ["digits", "--fresh"]) == (
        "interrupted; rerun the same command without --fresh to resume from the newest checkpoint"
    )


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("digits --procs 4 --run x --fresh", "--run x"),
        ("--procs=4 digits --run x", "--run x"),
        ("--run digits digits", "--run digits"),
        ("--optim.lr=0.1 digits --run digits", "--optim.lr=0.1 --run digits"),
        ("--log.trace digits", "--log.trace"),
    ],
)
def test_on_two_nodes_the_launcher_has_its_flags_before_the_task(words: str, rest: str) -> None:
    command = two_node_command("digits", words.split(), procs=4)
    assert command == f"drumline launch --hosts HOST_A,HOST_B --procs 4 digits {rest}"
