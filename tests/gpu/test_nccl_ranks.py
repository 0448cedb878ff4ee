"""Several NCCL ranks on one GPU, each as if on a host of its own (NCCL_HOSTID): what one rank alone
cannot show.

Every job is the real command with `--procs N`; a `sitecustomize` gives each of its ranks its host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drumline.runs.events import read_events
from tests.jobs import assert_same_bits, newest
from tests.ranks import free_port, rank_environment
from tests.schedules import digest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]
ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
LIMIT_S = 150.0
ONCE = ("launch", "--procs", "2", "--max-restarts", "0")
OWN_HOSTS = """
import os
if "RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = "host-" + os.environ["RANK"]
"""
TASKS = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from drumline import Loss, Task

class Points(Task):
    defaults = {"train.steps": 60, "train.batch_size": 24, "train.deterministic": True, "optim.lr": 0.05,
                "log.every_steps": 5, "log.display": "plain", "checkpoint.every_steps": 20,
                "checkpoint.every_epochs": 0}

    def model(self):
        return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))

    def train_data(self):
        inputs = torch.randn(240, 6, generator=torch.Generator().manual_seed(5))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss(self, model, batch):
        return Loss(functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"))

class Faulty(Points):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 30 and os.environ["RANK"] == "1":
            self.fail()
        return super().loss(model, batch)

class Mismatch(Faulty):
    def fail(self):
        dist.all_reduce(torch.ones(3, device="cuda"))

class Leaves(Faulty):
    def fail(self):
        os._exit(0)

class FlipsABit(Faulty):
    defaults = {**Points.defaults, "watch.replicas_every": 5}

    def model(self):
        self.net = super().model()
        return self.net

    def fail(self):
        self.net[0].weight.data.view(torch.int32)[3, 2] ^= 1
"""
KEEPS_A_GRAPH = """
import torch, torch.distributed as dist
from drumline import DDPManager
with DDPManager() as ddp:
    value = torch.ones(4, device=ddp.device)
    dist.all_reduce(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(value)
    graph.replay()
    torch.cuda.synchronize()
    print("trained", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOSTS)
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


class Command:
    """A `drumline` command that runs, started by `prefix`; what it prints goes to a file."""

    def __init__(self, folder: Path, words: tuple[str, ...], prefix: tuple[str, ...] = ()) -> None:
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.log = folder / f"output-{len(list(folder.glob('output-*')))}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "drumline", *words],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "NCCL_SOCKET_IFNAME": "lo",
                    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.output):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def finish(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {limit_s:g} s:\n{self.output}")


@contextmanager
def running(folder: Path, *words: str, prefix: tuple[str, ...] = ()) -> Iterator[Command]:
    command = Command(folder, words, prefix)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()


def run(
    folder: Path, *words: str, prefix: tuple[str, ...] = (), limit_s: float = LIMIT_S
) -> Command:
    with running(folder, *words, prefix=prefix) as command:
        command.finish(limit_s)
    return command


def train(folder: Path, task: str, name: str, *words: str, procs: int = 2) -> Command:
    return run(folder, "train", f"tasks.py:{task}", "--procs", str(procs), "--run", name, *words)


def losses(folder: Path, name: str) -> list[float]:
    events = read_events(folder / name / "events" / "rank-00000.jsonl")
    return [event["loss"] for event in events if event["kind"] == "train"]


def pid_of(folder: Path, name: str, rank: int) -> int:
    ranks = json.loads((folder / name / "environment.json").read_text())["ranks"]
    return next(int(entry["pid"]) for entry in ranks if entry["rank"] == rank)


def test_every_kind_of_step_trains_exits_and_agrees_with_eager(folder: Path) -> None:
    results = {}
    for step in ("eager", "graph", "compile", "compiled_graph"):
        command = train(folder, "Points", step, "--train.step", step)
        assert command.process.returncode == 0, command.output
        assert "not destroyed" not in command.output
        assert "run eagerly" not in command.output
        results[step] = losses(folder, step)
    assert results["graph"] == results["eager"]
    for step in ("compile", "compiled_graph"):
        assert results[step] == pytest.approx(results["eager"], rel=0.05, abs=0.03)


def test_captured_steps_of_a_compiled_model_do_not_keep_the_process(folder: Path) -> None:
    """torch's compiler refers to a graph of this model to the end, and NCCL would wait for it."""
    words = ("--run", "digits", "--train.step", "compiled_graph", "--train.epochs", "6")
    command = run(folder, "train", "digits", "--procs", "2", *words)
    assert command.process.returncode == 0, command.output
    assert "not destroyed" not in command.output


def test_auto_tries_every_step_and_exits(folder: Path) -> None:
    command = train(
        folder,
        "Points",
        "auto",
        "--train.step",
        "auto",
        "--train.steps",
        "140",
        "--no-train.deterministic",
    )
    assert command.process.returncode == 0, command.output
    assert re.search(r"steps run as \w+, the fastest here", command.output), command.output


def test_elastic_has_the_same_bits_on_one_to_four_ranks(folder: Path) -> None:
    words = ("--train.exact", "elastic", "--train.shards", "12")
    for procs in (1, 2, 3, 4):
        command = train(folder, "Points", f"elastic-{procs}", *words, procs=procs)
        assert command.process.returncode == 0, command.output
    assert len({digest(folder / f"elastic-{procs}") for procs in (1, 2, 3, 4)}) == 1


def test_a_run_resumes_on_other_numbers_of_ranks_with_each_sample_once(folder: Path) -> None:
    for procs, steps in ((2, "20"), (3, "40"), (1, "60")):
        command = train(folder, "Points", "moved", "--train.steps", steps, procs=procs)
        assert command.process.returncode == 0, command.output
    verified = run(folder, "verify", "moved")
    assert verified.process.returncode == 0, verified.output


def test_prove_resume_holds_on_two_ranks(folder: Path) -> None:
    command = run(
        folder,
        "prove-resume",
        "tasks.py:Points",
        "--world",
        "2",
        "--steps",
        "40",
        "--train.step",
        "graph",
    )
    assert command.process.returncode == 0, command.output
    assert "proved" in command.output, command.output


def test_a_flipped_bit_is_named(folder: Path) -> None:
    command = run(folder, *ONCE, "tasks.py:FlipsABit", "--run", "flipped")
    assert command.process.returncode != 0, command.output
    assert "rank 1" in command.output, command.output
    assert "0.weight" in command.output, command.output


def test_sync_batch_norm_on_two_ranks_is_batch_norm_on_one(folder: Path) -> None:
    words = ("--dist.sync_batchnorm", "--optim.lr", "0.01")
    for procs in (1, 2):
        command = train(folder, "Points", f"synced-{procs}", *words, procs=procs)
        assert command.process.returncode == 0, command.output
    alone, both = (newest(folder / f"synced-{procs}").tensors for procs in (1, 2))
    for file, tensors in alone.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                both[file][name], tensor, rtol=1e-3, atol=1e-4, check_dtype=False
            )


@pytest.mark.parametrize("step", ["eager", "graph"])
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "SIGKILL")]
)
def test_a_rank_that_is_stopped_or_killed_is_named(
    folder: Path, step: str, number: signal.Signals, said: str
) -> None:
    words = (
        "--run",
        "faulty",
        "--train.step",
        step,
        "--train.steps",
        "100000",
        "--watch.on_hang",
        "stop",
    )
    with running(folder, *ONCE, "tasks.py:Points", *words) as command:
        command.wait_for(r"saved step 40 ")
        os.kill(pid_of(folder, "faulty", 1), number)
        assert command.finish() != 0, command.output
    assert re.search(rf"rank 1 on {re.escape(HOST)}.*{said}", command.output), command.output


@pytest.mark.parametrize(("task", "said"), [("Mismatch", "all_?reduce"), ("Leaves", "exit")])
def test_a_mismatch_and_a_rank_that_leaves_are_named(folder: Path, task: str, said: str) -> None:
    command = run(folder, *ONCE, f"tasks.py:{task}", "--run", "faulty", "--watch.on_hang", "stop")
    assert command.process.returncode != 0, command.output
    assert re.search(rf"rank 1 on {re.escape(HOST)}.*({said})", command.output), command.output


@pytest.mark.timeout(400)  # two runs of 3,000 steps, beside other tests on the one GPU
def test_a_preempted_run_saves_and_resumes_with_the_same_bits(folder: Path) -> None:
    words = ("--train.steps", "3000", "--train.step", "graph")
    assert train(folder, "Points", "whole", *words).process.returncode == 0
    with running(
        folder, "train", "tasks.py:Points", "--procs", "2", "--run", "preempted", *words
    ) as command:
        command.wait_for(r"saved step 40 ")
        command.process.send_signal(signal.SIGTERM)
        assert command.finish() == 75, command.output
    assert train(folder, "Points", "preempted", *words).process.returncode == 0
    assert_same_bits(newest(folder / "whole"), newest(folder / "preempted"))


@pytest.mark.parametrize("comm", ["bf16", "fp16"])
def test_rounded_gradients_are_captured_with_the_same_bits(folder: Path, comm: str) -> None:
    for step in ("eager", "graph"):
        command = train(folder, "Points", step, "--train.step", step, "--dist.comm", comm)
        assert command.process.returncode == 0, command.output
        assert "run eagerly" not in command.output, command.output
    plain = train(folder, "Points", "plain")
    assert plain.process.returncode == 0, plain.output
    assert losses(folder, "graph") == losses(folder, "eager")
    assert losses(folder, "eager") != losses(folder, "plain")
    assert losses(folder, "eager") == pytest.approx(losses(folder, "plain"), rel=0.05, abs=0.03)


def test_powersgd_resumes_with_the_same_bits_and_is_not_captured(folder: Path) -> None:
    # A bucket for each parameter.
    words = (
        "--dist.comm",
        "powersgd",
        "--dist.powersgd_start",
        "10",
        "--dist.bucket_cap_mb",
        "0.0001",
    )
    words += ("--train.steps", "600")
    refused = train(folder, "Points", "refused", *words, "--train.step", "graph")
    assert refused.process.returncode == 2, refused.output
    assert "PowerSGD waits for the device in every step (--dist.comm powersgd)" in refused.output
    assert train(folder, "Points", "whole", *words).process.returncode == 0
    with running(
        folder, "train", "tasks.py:Points", "--procs", "2", "--run", "preempted", *words
    ) as command:
        command.wait_for(r"saved step 40 ")
        command.process.send_signal(signal.SIGTERM)
        assert command.finish() == 75, command.output
    assert train(folder, "Points", "preempted", *words).process.returncode == 0
    assert_same_bits(newest(folder / "whole"), newest(folder / "preempted"))
    assert newest(folder / "whole").tensors["comm"]


def test_the_doctors_collectives_are_right(folder: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "drumline.tools.doctor.ranks.doctor_rank", "nccl", "60"]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            words,
            env={
                **os.environ,
                **rank_environment(rank, 2, port),
                "PYTHONPATH": path,
                "NCCL_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all('"ok": true' in text for text in outputs), outputs


def test_a_group_that_cannot_be_destroyed_does_not_keep_the_process(folder: Path) -> None:
    """A graph of the user's own with a collective in it, which is alive to the end."""
    (folder / "own.py").write_text(KEEPS_A_GRAPH)
    command = run(folder, "launch", "--procs", "2", "own.py")
    assert re.search(r"not destroyed within \d+ s. Try: release CUDA graphs", command.output), (
        command.output
    )
    assert command.output.count("trained") == 2, command.output
