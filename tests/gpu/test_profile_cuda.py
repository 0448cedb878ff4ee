"""`drumline profile` on NCCL ranks that share a GPU: a planted bottleneck is named first, and the
parts add up."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_nccl_ranks import LIMIT_S, OWN_HOSTS, ROOT, run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOSTS)
    (tmp_path / "planted.py").write_text((ROOT / "tests" / "planted_jobs.py").read_text())
    return tmp_path


# In a network namespace of its own, where the loopback has a limit. The GPU machine has no `tc`.
SLOW_LOOPBACK = """
import os, sys
from pyroute2 import IPRoute

with IPRoute() as routes:
    (loopback,) = routes.link_lookup(ifname="lo")
    routes.link("set", index=loopback, state="up")
    routes.tc("add", "tbf", loopback, 0x10000, rate=sys.argv[1], burst=1 << 18, latency="400ms")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def profile(folder: Path, task: str, *words: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """The document of a profile of two ranks; what the command prints to both streams is in one
    file."""
    words = (f"planted.py:{task}", "--procs", "2", "--run", "profiled", "--json", *words)
    # With --try ten short runs follow each other.
    command = run(
        folder, "profile", *words, prefix=prefix, limit_s=400 if "--try" in words else LIMIT_S
    )
    assert command.process.returncode == 0, command.output
    lines = [line for line in command.output.splitlines() if line.startswith("{")]
    document: dict[str, Any] = json.loads(lines[-1])
    return document


# Where ranks share a GPU an all-reduce takes 5 ms and more, so what is planted has to cost much
# more than that. The loopback is slow as well: NCCL reduces 270 MB over it in 150 ms.
CASES = [
    ("SlowData", "data", ("--task.load_s", "0.02")),
    ("TinyBuckets", "bucket_size", ()),
    ("LargeGradients", "network", ("--task.width", "4096")),
    (
        "HalfSpeed",
        "slow_rank",
        ("--task.width", "2048", "--task.passes", "200", "--train.batch_size", "512"),
    ),
    ("ItemEachStep", "host_sync", ("--task.reads", "100")),
    ("SyncedNorms", "other_collectives", ()),
]


@pytest.mark.parametrize(("task", "bottleneck", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_planted_bottleneck_is_named_first(
    folder: Path, task: str, bottleneck: str, words: tuple[str, ...]
) -> None:
    result = profile(folder, task, *words)
    assert (result["backend"], result["world_size"]) == ("nccl", 2)
    assert result["advice"][0]["bottleneck"] == bottleneck, json.dumps(result["advice"], indent=1)
    for rank in result["ranks"]:
        mean = sum(rank["step_s"]) / len(rank["step_s"])
        assert sum(rank["parts_s"].values()) == pytest.approx(mean, rel=0.02)
    if task == "ItemEachStep":
        assert "planted.py:" in result["advice"][0]["text"], "the line of the .item() is named"


def test_a_throttled_link_is_named_first(folder: Path) -> None:
    """The same job with and without the limit: only the link makes the difference, and its measured
    rate shows it."""
    pytest.importorskip("pyroute2", reason="pyroute2 is not on the path")
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` command")
    limited = ("unshare", "--net", sys.executable, "-c", SLOW_LOOPBACK, "400mbit")
    result = profile(folder, "Planted", "--task.width", "1024", prefix=limited)
    assert (result["backend"], result["world_size"]) == ("nccl", 2)
    assert result["advice"][0]["bottleneck"] == "network", json.dumps(result["advice"], indent=1)
    for rank in result["ranks"]:
        mean = sum(rank["step_s"]) / len(rank["step_s"])
        assert sum(rank["parts_s"].values()) == pytest.approx(mean, rel=0.02)
    rates = [bucket["num_bytes"] * 8 / bucket["reduce_s"] for bucket in result["buckets"]]
    assert rates
    assert max(rates) < 400e6, "two ranks share the limit of the loopback"


def test_overlap_and_idle_time_can_be_compared_with_other_tools(folder: Path) -> None:
    """With Holistic Trace Analysis on the path, the two agree; without it, ours are numbers from 0
    to 100."""
    from benchmarks.hta_agreement import GOAL, ours, theirs
    from drumline.runs.profile_files import trace_path
    from drumline.runs.profile_result import read_profile

    profile(
        folder,
        "Planted",
        "--task.width",
        "2048",
        "--task.layers",
        "12",
        "--train.batch_size",
        "256",
    )
    run_folder = folder / "profiled"
    result = read_profile(run_folder)
    by_rank = {rank.rank: ours(rank) for rank in result.ranks}
    assert all(0 <= percent <= 100 for pair in by_rank.values() for percent in pair)
    pytest.importorskip("hta", reason="Holistic Trace Analysis is not on the path")
    others = theirs({rank: trace_path(run_folder / "profile", rank) for rank in by_rank})
    for rank, pair in by_rank.items():
        assert others[rank] == pytest.approx(pair, abs=GOAL), (rank, pair, others[rank])


@pytest.mark.timeout(450)
def test_what_a_change_brings_is_within_its_band(folder: Path) -> None:
    result = profile(folder, "TinyBuckets", "--try")
    (trial,) = [trial for trial in result["trials"] if "dist.bucket_cap_mb" in trial["settings"]]
    assert trial["failure"] is None
    assert trial["band"][0] <= trial["ratio"] <= trial["band"][1], trial
