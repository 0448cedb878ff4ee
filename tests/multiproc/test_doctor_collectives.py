"""The doctor's collectives on real ranks: right ones, a wrong value, a model that is not kept in
step, ranks that never come, and one that freezes; each told with its rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import Place
from drumline.config.schema import WatchConfig
from drumline.rank.sealed_store import SealedStore
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.ranks import doctor_rank, rank_processes
from drumline.tools.doctor.ranks.doctor_rank import (
    LARGE,
    Collectives,
    PhaseTimer,
    RankReport,
    check_rank,
)
from drumline.tools.doctor.ranks.rank_processes import (
    collective_findings,
    local_collectives,
    measured,
    read_result,
)
from drumline.training.manager import RunManager
from tests.ranks import RanksFailed, run_ranks

HOST = socket.gethostname()
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}


def whole_program() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = doctor_rank.main(["gloo", "60"])
    assert code == 0, output.getvalue()
    return f"NCCL version 2.27.5\n{output.getvalue()}goodbye\n{{not json}}\n"


def test_healthy_ranks_find_nothing_and_measure() -> None:
    results = {rank: read_result(text) for rank, text in enumerate(run_ranks(3, whole_program))}
    assert {rank: (one["rank"], one["host"], one["ok"]) for rank, one in results.items()} == {
        rank: (rank, HOST, True) for rank in range(3)
    }
    said = [{"rank": rank, "host": HOST, "result": result} for rank, result in results.items()]
    assert collective_findings(said, {}) == []
    numbers = measured(said)
    assert numbers["all_reduce_bytes"] == 4 * LARGE
    assert numbers["all_reduce_gb_per_s"] > 0
    assert numbers["all_reduce_latency_us"] > 0


class WrongOnRank1(Collectives):
    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        super().all_reduce(tensor, op)
        if dist.get_rank() == 1 and tensor.dtype == torch.int64 and tensor.numel() == LARGE:
            tensor[17] += 1
        return tensor


class NotWrapped(RunManager):
    """As in a script that forgets DDP."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        return model


def examined(
    ddp: RunManager, exchange: type[Collectives] = Collectives
) -> list[tuple[str, str, str]]:
    lines: list[str] = []
    report = RankReport(ddp, write=lines.append)
    check_rank(report, PhaseTimer(limit_s=60, place=ddp.place, on_late=report.give_up), exchange)
    report.print()
    ddp.cleanup()
    result = json.loads(lines[0])
    assert result["ok"] == (not result["findings"])
    return [(finding["where"], finding["what"], finding["fix"]) for finding in result["findings"]]


def wrong_value() -> Any:
    return examined(RunManager(backend="gloo", device="cpu"), WrongOnRank1)


def not_wrapped() -> Any:
    return examined(NotWrapped(backend="gloo", device="cpu"))


def test_a_wrong_value_is_reported_by_the_rank_that_got_it() -> None:
    first, second = run_ranks(2, wrong_value)
    assert first == []
    assert second == [
        (
            HOST,
            f"rank 1 on {HOST}: all_reduce (sum) of 8 MiB as int64 gave 1 wrong values of 1048576: element 17 is 13, "
            "expected 12",
            "test memory and links of that host (nvidia-smi -q -d ECC; dmesg), and leave it out until then",
        )
    ]


def test_gradients_that_are_not_averaged_and_weights_apart_are_seen() -> None:
    for rank, found in enumerate(run_ranks(2, not_wrapped)):
        texts = [what for _, what, _ in found]
        assert len(texts) == 5
        start = f"rank {rank} on {HOST}: the gradient of 0.weight is not the average over 2 ranks: element 0 is "
        assert texts[0].startswith(start)
        assert texts[-1] == (
            f"rank {rank} on {HOST}: after one step under DDP the weights of rank 1 on {HOST} differ from those of "
            f"rank 0 on {HOST}"
        )


def never_met() -> Any:
    os.environ["WORLD_SIZE"] = "2"
    alone = examined(RunManager(backend="gloo", device="cpu", start_timeout_s=0.5))
    no_gpu = examined(RunManager(device="cuda"))
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return alone, no_gpu, examined(RunManager(backend="gloo", device="cpu"))


def test_a_rank_that_never_joined_is_reported_and_so_is_a_missing_launcher() -> None:
    ((alone, no_gpu, no_launcher),) = run_ranks(1, never_met)
    assert alone == [
        (
            HOST,
            f"rank 0 on {HOST}: 1 of 2 ranks did not start within 0.5 s: missing rank 1 (node 1); here: 0 on {HOST}",
            "look at the missing ranks' own output; raise --dist.start_timeout_s if they are only slow",
        )
    ]
    if not torch.cuda.is_available():
        assert [what for _, what, _ in no_gpu] == [
            f"rank 0 on {HOST}: local rank 0 has no GPU of its own: torch sees 0 on this host"
        ]
    assert no_launcher == [
        (
            HOST,
            f"rank 0 on {HOST}: RANK is not set in the environment",
            "start it with drumline doctor --collectives",
        )
    ]


class FreezesInTheLargeSum(Collectives):
    """Rank 1 stops dead, as by `kill -STOP`."""

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if tensor.numel() == LARGE and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().all_reduce(tensor, op)


def frozen(folder: Path) -> None:
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

    def write(line: str) -> None:
        (folder / "line").write_text(line)
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)

    doctor_rank.LINGER_S = 0.0
    ddp = RunManager(backend="gloo", device="cpu", watch=WatchConfig(sidecar="off"))
    report = RankReport(ddp, write=write)
    check_rank(
        report, PhaseTimer(limit_s=3, place=ddp.place, on_late=report.give_up), FreezesInTheLargeSum
    )


def test_a_frozen_rank_is_named_by_the_one_that_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as ended:
        run_ranks(2, frozen, tmp_path)
    assert ended.value.errors == dict.fromkeys((0, 1), "the process ended without a word")
    result = read_result((tmp_path / "line").read_text())
    assert result is not None
    assert (result["rank"], result["ok"], result["numbers"]) == (0, False, {})
    assert result["findings"] == [
        {
            "level": "problem",
            "check": "collectives",
            "where": HOST,
            "what": f"rank 1 on {HOST} did not finish all_reduce (sum) of 4 MiB as float32 within 3 s and does "
            "not respond: it is stopped, or its host is cut off",
            "fix": "inspect that process (py-spy dump, dmesg), and check its host: drumline doctor --hosts",
            "rank": 1,
        }
    ]


BLAMES = """
import json, os, signal, sys
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
finding = dict(level="problem", check="collectives", where="h", what="rank 1 on h froze", fix="look", rank=1)
print(json.dumps(dict(rank=0, host="h", ok=False, findings=[finding], numbers={})))
sys.exit(3)
"""


def test_a_rank_that_a_finding_is_about_is_not_waited_for_and_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_processes, "PROGRAM", ("-c", BLAMES))
    findings, numbers = local_collectives(2, environment=ENVIRONMENT, num_gpus=0, backend="gloo")
    assert [finding.what for finding in findings] == ["rank 1 on h froze"]
    assert numbers == {}


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("import sys; print('boom', file=sys.stderr); sys.exit(9)", "exited with code 9: boom"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import time; time.sleep(60)", "still running after 1 s"),
    ],
)
def test_a_rank_that_prints_nothing_is_reported_with_its_exit(
    program: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "PROGRAM", ("-c", program))
    monkeypatch.setattr(rank_processes, "LOCAL_LIMIT_S", 1.0)
    findings, _ = local_collectives(1, environment=ENVIRONMENT, num_gpus=0, backend="gloo")
    (found,) = findings
    assert found.line() == (f"problem: {HOST}: rank 0 gave no result: {what}")


def test_more_ranks_than_gpus_are_refused_for_nccl() -> None:
    def refused(procs: int | None, num_gpus: int) -> tuple[str, str]:
        ((finding,), _) = local_collectives(
            procs, environment={}, num_gpus=num_gpus, backend="nccl"
        )
        return finding.what, finding.fix

    assert refused(2, 1) == (
        "NCCL needs a GPU per rank: 2 ranks, and torch sees 1 GPU",
        "--procs 1, or --backend gloo",
    )
    assert refused(None, 0) == (
        "NCCL needs a GPU per rank: 1 rank, and torch sees 0 GPUs",
        "--backend gloo",
    )


class Watched:
    """Two ranks' timers on one store, and what each reports when a phase is late."""

    def __init__(self, store: SealedStore, limits: tuple[float, float]) -> None:
        self.said: queue.Queue[list[Finding]] = queue.Queue()
        places = (Place("node-a", 0), Place("node-b", 1))
        self.timers = [
            PhaseTimer(limit_s=limit, place=partial(replace, place), on_late=self.said.put)
            for limit, place in zip(limits, places, strict=True)
        ]
        for timer in self.timers:
            timer.joined(store, world_size=2)

    def next(self) -> list[tuple[str, str]]:
        return [(one.where, one.what) for one in self.said.get(timeout=20)]


def test_the_timer_names_who_is_behind_who_does_not_respond_and_when_nobody_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_rank, "LATE_START_S", 1.0)
    behind = Watched(SealedStore(dist.HashStore(), "a secret"), (0.1, 60))
    with behind.timers[1].phase("A"):
        with behind.timers[0].phase("A", limit_s=60):
            pass
        with behind.timers[0].phase("B"):
            assert behind.next() == [
                ("node-b", "rank 1 on node-b did not reach B within 0.1 s: it is still in A")
            ]
    never = Watched(SealedStore(dist.HashStore(), "a secret"), (0.1, 60))
    with never.timers[0].phase("A"):
        assert never.next() == [
            ("?", "rank 1 on ? did not reach A within 0.1 s: it is still in its start")
        ]
    stuck = Watched(SealedStore(dist.HashStore(), "a secret"), (0.1, 0.1))
    with stuck.timers[0].phase("A"), stuck.timers[1].phase("A"):
        what = "rank 0 and rank 1 all started A and did not finish it within 0.1 s: what they send does not arrive"
        assert stuck.next() == stuck.next() == [("node-a and node-b", what)]
    silent = Watched(SealedStore(dist.HashStore(), "a secret"), (0.1, 60))
    with silent.timers[0].phase("A"), silent.timers[1].phase("A"):
        what = "rank 1 on node-b did not finish A within 0.1 s and does not respond: it is stopped, or its "
        assert silent.next() == [("node-b", what + "host is cut off")]


class StoppedStore(SealedStore):
    """As that of a rank 0 that was stopped: connected, and silent."""

    def peek(self, key: str) -> bytes | None:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


def test_the_timer_knows_a_store_that_does_not_respond_and_a_rendezvous_that_does_not_end() -> None:
    gone = Watched(StoppedStore(dist.HashStore(), "a secret"), (0.1, 60))
    with gone.timers[0].phase("A"):
        assert gone.next() == [
            (
                "node-a",
                "rank 0 did not finish A within 0.1 s, and rank 0, which runs the store, "
                "does not respond: it is stopped, or its host is cut off",
            )
        ]
    said: queue.Queue[list[Finding]] = queue.Queue()
    alone = PhaseTimer(limit_s=0.1, place=lambda: Place(host="node-b", rank=1), on_late=said.put)
    with alone.phase("the rendezvous"):
        assert [
            (sentence.where, sentence.what, sentence.fix) for sentence in said.get(timeout=20)
        ] == [
            (
                "node-b",
                "rank 1 on node-b did not finish the rendezvous within 0.1 s: ranks reach the rendezvous "
                "port, but not each other",
                "open high ports between hosts, and check which network they use: drumline doctor --hosts",
            )
        ]
