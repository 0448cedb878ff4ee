"""Profiles to test with: synthetic traces of two gloo ranks, and parts of real ones of two NCCL
ranks on an H200."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from drumline.runs.profile_files import JobFacts, RankFacts, trace_path, write_facts
from drumline.runs.profile_result import ProfileResult
from drumline.tools.profile.profile_analysis import analyse

DATA = Path(__file__).parents[3] / "data" / "profile"
MS = 1000.0
"""In a trace's unit."""
AUTOGRAD = "autograd::engine::evaluate_function: "
Entry = dict[str, Any]


def entry(
    name: str, start_ms: float, end_ms: float, kind: str = "cpu_op", thread: int = 1, **args: Any
) -> Entry:
    lasts = (end_ms - start_ms) * MS
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 7,
        "tid": thread,
        "ts": start_ms * MS,
        "dur": lasts,
        "args": args,
    }


def mark(name: str, start_ms: float, end_ms: float) -> Entry:
    return entry(name, start_ms, end_ms, "user_annotation")


def gloo_step(number: int, start: float, *, bucket_at: float, reduced_at: float) -> list[Entry]:
    """100 ms: 10 of data, forward, backward with one bucket from `bucket_at` to `reduced_at`, and
    an update of 5 ms."""
    return [
        mark(f"drumline.step#{number}", start, start + 99),
        mark("drumline.data", start, start + 10),
        entry("aten::stack", start + 2, start + 8),
        entry("aten::linear", start + 10, start + 20),
        entry("aten::addmm", start + 11, start + 19),
        entry(f"{AUTOGRAD}AddmmBackward0", start + 20, start + 31),
        entry("AddmmBackward0", start + 20, start + 30),
        entry(
            f"{AUTOGRAD}torch::autograd::AccumulateGrad", start + bucket_at, start + bucket_at + 1
        ),
        entry("c10d::allreduce_", start + bucket_at, start + bucket_at + 0.5),
        entry(
            "gloo:all_reduce",
            start + bucket_at + 1,
            start + reduced_at,
            "user_annotation",
            thread=9,
        ),
        entry("aten::copy_", start + 40, start + 41, thread=9),
        entry("aten::_fused_sgd_", start + 90, start + 95),
    ]


def write_rank(
    run: Path,
    rank: int,
    entries: list[Entry],
    *,
    world_size: int = 2,
    host: str = "a",
    **facts: Any,
) -> None:
    folder = run / "profile"
    write_facts(
        folder,
        RankFacts(
            rank=rank,
            world_size=world_size,
            host=host,
            first_step=2,
            num_steps=2,
            **{
                "device": "cpu",
                "backend": "gloo",
                "bucket_bytes": (1_000_000,),
                "job": JobFacts(task="digits"),
                **facts,
            },
        ),
    )
    document = {"baseTimeNanoseconds": 10**18, "traceEvents": [{"ph": "M", "name": "x"}, *entries]}
    trace_path(folder, rank).write_bytes(gzip.compress(json.dumps(document).encode()))


def two_ranks(run: Path, *, later_ms: float = 0.0, host: str = "a") -> ProfileResult:
    """Rank 0 reduces from 30 ms on, rank 1 from 60: both end at 80. `later_ms`: rank 1's clock."""
    for rank, bucket_at in enumerate((30.0, 60.0)):
        by = later_ms * rank
        steps = [
            gloo_step(n, (n - 2) * 100 + by, bucket_at=bucket_at, reduced_at=80) for n in (2, 3)
        ]
        write_rank(
            run,
            rank,
            [*steps[0], *steps[1], mark("drumline.end", 200 + by, 200 + by)],
            host=host if rank else "a",
        )
    return analyse(run)


def nccl_ranks(run: Path, kind: str) -> ProfileResult:
    """Two steps of a DDP job on two NCCL ranks that share an H200 (torch 2.11). `slow`: rank 1
    sleeps 50 ms; `tiny`: buckets of 50 kB; `item`: `loss.item()` in each step."""
    for rank in (0, 1):
        write_rank(run, rank, [], device="NVIDIA H200", backend="nccl", bucket_bytes=())
        shutil.copy(DATA / f"nccl-{kind}-rank{rank}.json.gz", trace_path(run / "profile", rank))
    return analyse(run)
