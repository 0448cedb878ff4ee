"""The trace of all ranks: one process for each rank and its GPU, times by one clock, flows that stay apart."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from drumline.scale.merged_trace import renumbered
from tests.unit.scale.profiles import MS, Entry, entry, two_ranks


def merged(run: Path) -> list[Entry]:
    document = json.loads(gzip.decompress((run / "profile/merged.trace.json.gz").read_bytes()))
    found: list[Entry] = document["traceEvents"]
    return found


def test_ranks_of_two_hosts_are_by_one_clock(tmp_path: Path) -> None:
    two_ranks(tmp_path, later_ms=5000, host="b")
    entries = merged(tmp_path)
    reduced = [one for one in entries if one["name"] == "gloo:all_reduce"]
    assert sorted(one["pid"] for one in reduced) == [0, 0, 100, 100]
    ends = {(one["pid"], round((one["ts"] + one["dur"]) / MS)) for one in reduced}
    assert ends == {(0, 80), (0, 180), (100, 80), (100, 180)}
    names = [one["args"]["name"] for one in entries if one["name"] == "process_name"]
    assert names == ["rank 0 on a", "rank 1 on b"]


def test_streams_of_a_gpu_and_flows_belong_to_their_rank() -> None:
    flow = {"ph": "s", "id": 5, "pid": 7, "tid": 1, "ts": 2.0, "name": "ac2g"}
    kernel = {**entry("sgemm", 1, 2, "kernel"), "pid": 0}
    thread = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "args": {"name": "main"}}
    found = list(renumbered([thread, entry("aten::mm", 0, 1), kernel, flow, None, {"ph": "X"}], 3, "a", 10.0))
    assert [one["pid"] for one in found[:4]] == [300, 300, 301, 300]
    assert found[3]["id"] == "3.5"
    assert found[1]["ts"] == pytest.approx(10.0)
    assert [one["args"]["name"] for one in found if one["name"] == "process_name"] == [
        "rank 3 on a",
        "rank 3 on a, GPU 0",
    ]
