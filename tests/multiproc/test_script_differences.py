"""`drumline launch --watch` finds in what ranks of a script differ, without the script's help; and
nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
# Ends when all was reported, or late: rank 0 looks, since both must take the same number of steps.
FAULTY = """
import argparse, glob, os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--node-rank", type=int)
parser.add_argument("--samples", type=int)
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(options.samples, 16), torch.randn(options.samples, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
go_on, deadline = torch.ones(1), time.monotonic() + 60
while go_on:
    for x, y in loader:
        time.sleep(0.02 if options.node_rank == 0 else 0.2)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        said = "".join(open(name).read() for name in glob.glob("runs/launch/*/events/watch.jsonl"))
        go_on = torch.tensor(float(said.count("message") < 4 and time.monotonic() < deadline))
        dist.broadcast(go_on, 0)
        if not go_on:
            break
dist.destroy_process_group()
"""
# What healthy scripts do: two models with an optimizer each, gradients of several batches, an
# evaluation on rank 0, a seed of each rank, a loader of uneven lengths, sharded parameters, ranks
# that train alone for a while.
HEALTHY = """
import contextlib, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
data = TensorDataset(torch.randn(300, 8), torch.randn(300, 8))
loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data))
two = [DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))) for _ in range(2)]
optimizers = [torch.optim.AdamW(two[0].parameters()), torch.optim.SGD(two[1].parameters(), lr=0.1, momentum=0.9)]
for epoch in range(4):
    for step, (x, y) in enumerate(loader):
        for model, optimizer in zip(two, optimizers):
            is_last = step % 2 == 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                nn.functional.mse_loss(model(x + rank), y).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    if rank == 0:
        two[0].train()
        for x, y in DataLoader(data, batch_size=50):
            two[0].module(x)
        torch.save(two[0], "model.pt")
    dist.barrier()
uneven = DataLoader(TensorDataset(torch.randn(40 + 30 * rank, 8)), batch_size=5)
with two[1].join():
    for (x,) in uneven:
        two[1](x).sum().backward()
        optimizers[1].step()
alone = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(30):
    with alone.no_sync():
        alone(torch.randn(2, 8)).sum().backward()
    optimizer.step()
sharded = fully_shard(nn.Linear(8, 8))
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
for step in range(20):
    sharded(torch.randn(2, 8)).sum().backward()
    optimizer.step()
for parameter in two[0].parameters():
    sys.stdout.write(f"{rank} {parameter.double().sum().item()}\\n")  # in one piece: ranks share the pipe
dist.destroy_process_group()
"""


def start(*words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", "launch", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*jobs: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    try:
        texts = [job.communicate(timeout=200) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    return [(job.returncode, *text) for job, text in zip(jobs, texts, strict=True)]


def events(folder: Path) -> list[dict[str, Any]]:
    files = folder.glob("runs/launch/*/events/watch.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("warm")
@pytest.mark.soak
def test_two_nodes_that_differ_in_everything(tmp_path: Path) -> None:
    """In a job on two nodes: another learning rate, dataset, variable and script, and one ten times
    slower."""
    master = f"127.0.0.1:{free_port()}"
    nodes = []
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "train.py").write_text(FAULTY + "# edited\n" * rank)
        place = [
            "--nodes",
            "2",
            "--node-rank",
            f"{rank}",
            "--master",
            master,
            "--procs",
            "1",
            "--watch",
        ]
        own = [
            "--lr",
            f"0.{rank + 1}",
            "--samples",
            f"{400 + 400 * rank}",
            "--node-rank",
            f"{rank}",
        ]
        variables = {"TORCH_DISTRIBUTED_DEBUG": "INFO"} if rank else {}
        nodes.append(start(*place, "train.py", *own, cwd=tmp_path / f"{rank}", **variables))
    ended = finish(*nodes)
    assert [code for code, *_ in ended] == [0, 0], ended
    differences = events(tmp_path / "0")
    assert sorted(difference["kind"] for difference in differences) == [
        "difference",
        "difference",
        "difference",
        "straggler",
    ], differences
    assert events(tmp_path / "1") == []
    [facts] = [
        difference["message"]
        for difference in differences
        if "the argument" in difference["message"]
    ]
    for what in (
        "argument --lr",
        "argument --samples",
        "variable TORCH_DISTRIBUTED_DEBUG",
        "code of train.py",
    ):
        assert f"the {what}: " in facts
    assert "node-rank" not in facts
    [length] = [
        difference["message"] for difference in differences if "DataLoader" in difference["message"]
    ]
    assert "the length of the dataset" in length
    [drift] = [
        difference for difference in differences if "DDP module Linear" in difference["message"]
    ]
    assert drift["step"] in (1, 10, 100)
    assert "all agreed at step 0; their optimizers differ in SGD's lr: " in drift["message"]
    [slow] = [difference for difference in differences if difference["kind"] == "straggler"]
    assert slow["rank"] == 1
    for difference in differences:
        assert ended[0][2].count(difference["message"]) == 1, (
            "on the screen of the first node, once"
        )


@pytest.mark.soak
@pytest.mark.usefixtures("warm")
def test_healthy_scripts_are_not_disturbed(tmp_path: Path) -> None:
    """Not a word, and the same bits as without the watch."""
    jobs = []
    for name, words in (("watched", ["--watch"]), ("plain", [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(HEALTHY)
        jobs.append(start(*words, "--procs", "2", "train.py", cwd=tmp_path / name))
    (code, watched, errors), (_, plain, _) = finish(*jobs)
    assert code == 0, errors
    assert "drumline" not in errors
    assert events(tmp_path / "watched") == []
    assert sorted(watched.splitlines()) == sorted(plain.splitlines()) != []
    assert b"drumline" not in (tmp_path / "watched" / "model.pt").read_bytes()
