"""The trace of all ranks: one process for each rank and its GPU, times by one clock, flows that
stay apart; by the trace event format, as Perfetto's JSON importer reads it (test_perfetto.py opens
traces in Perfetto itself)."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from drumline.tools.profile.merged_trace import EARLY_US, PROCESSES, renumbered
from drumline.tools.profile.profile_analysis import analyse
from tests.unit.tools.scale.profiles import (
    MS,
    Entry,
    entry,
    mark,
    nccl_ranks,
    two_ranks,
    write_rank,
)


def merged(run: Path) -> list[Entry]:
    document = json.loads(gzip.decompress((run / "profile/merged.trace.json.gz").read_bytes()))
    found: list[Entry] = document["traceEvents"]
    return found


def processes_of(path: Path) -> list[str]:
    """The names of the processes in a merged trace, whose entries are checked against the
    format."""
    entries = merged(path.parents[1])
    names = {one["pid"]: one["args"]["name"] for one in entries if one["name"] == "process_name"}
    ranks_of_flow: dict[int, set[int]] = defaultdict(set)
    for one in entries:
        assert (type(one["pid"]), type(one["tid"]), type(one["name"])) == (int, int, str), one
        assert one["pid"] in names, one
        assert 0 <= one["ts"] < math.inf, one
        if one["ph"] == "X":
            assert one["dur"] >= 0, one
        elif one["ph"] in "stf":
            assert type(one["id"]) is int, one
            ranks_of_flow[one["id"]].add(one["pid"] // PROCESSES)
        elif one["ph"] == "M":
            assert one["name"] in ("process_name", "process_sort_index", "thread_name"), one
            assert set(one["args"]) <= {"name", "sort_index"}, one
        else:
            assert one["ph"] == "i", one
    assert all(len(ranks) == 1 for ranks in ranks_of_flow.values())
    return [names[number] for number in sorted(names)]


def test_ranks_of_two_hosts_are_by_one_clock(tmp_path: Path) -> None:
    two_ranks(tmp_path, later_ms=5000, host="b")
    entries = merged(tmp_path)
    reduced = [one for one in entries if one["name"] == "gloo:all_reduce"]
    assert sorted(one["pid"] for one in reduced) == [100, 100, 200, 200]
    ends = {(one["pid"], round((one["ts"] - EARLY_US + one["dur"]) / MS)) for one in reduced}
    assert ends == {(100, 80), (100, 180), (200, 80), (200, 180)}
    assert processes_of(tmp_path / "profile/merged.trace.json.gz") == ["rank 0 on a", "rank 1 on b"]


def test_a_merged_trace_of_gpus_has_the_format(tmp_path: Path) -> None:
    nccl_ranks(tmp_path, "item")
    names = ["rank 0 on a", "rank 0 on a, GPU 0", "rank 1 on a", "rank 1 on a, GPU 0"]
    assert processes_of(tmp_path / "profile/merged.trace.json.gz") == names


def test_streams_of_a_gpu_and_flows_belong_to_their_rank() -> None:
    flow = {"ph": "s", "id": 5, "pid": 7, "tid": 1, "ts": 2.0, "name": "ac2g"}
    kernel = {**entry("sgemm", 1, 2, "kernel"), "pid": 0}
    thread = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "args": {"name": "main"}}
    unused = {
        "ph": "M",
        "name": "process_name",
        "pid": 3,
        "tid": 0,
        "ts": 0,
        "args": {"name": "python"},
    }
    own_rows = [{"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9.0}]
    own_rows += [{**entry("PyTorch Profiler (0)", 0, 9), "pid": "Spans", "tid": "PyTorch Profiler"}]
    found = list(
        renumbered(
            [thread, unused, entry("aten::mm", 0, 1), kernel, flow, *own_rows, None, {"ph": "X"}],
            3,
            "a",
            10.0,
        )
    )
    assert [one["pid"] for one in found[:4]] == [400, 400, 401, 400]
    assert found[3]["id"] == (3 << 40) + 5, "Perfetto reads text as a hexadecimal number"
    assert found[1]["ts"] == pytest.approx(10.0)
    assert [one["args"]["name"] for one in found if one["name"] == "process_name"] == [
        "rank 3 on a",
        "rank 3 on a, GPU 0",
    ]


def ranks_with_flows(run: Path) -> None:
    """Each of two ranks has an arrow with the number 5, from its first operation to its second."""
    for rank in (0, 1):
        steps = [
            mark("drumline.step#2", 0, 50),
            mark("drumline.end", 50, 50),
            entry("aten::mm", 0, 30),
        ]
        arrows = [
            {
                "ph": phase,
                "id": 5,
                "pid": 7,
                "tid": 1,
                "ts": at * MS,
                "name": "fwdbwd",
                "cat": "fwdbwd",
                "bp": "e",
            }
            for phase, at in (("s", 2), ("f", 42))
        ]
        write_rank(run, rank, [*steps, entry("MmBackward0", 40, 45), *arrows])
    analyse(run)


def test_flows_of_two_ranks_do_not_meet(tmp_path: Path) -> None:
    ranks_with_flows(tmp_path)
    assert processes_of(tmp_path / "profile/merged.trace.json.gz") == ["rank 0 on a", "rank 1 on a"]
    assert len({one["id"] for one in merged(tmp_path) if one["ph"] in "sf"}) == 2


def test_a_kernel_ends_where_the_next_of_its_stream_begins() -> None:
    kernels = [
        {**entry("mm", *times, "kernel"), "pid": 0, "tid": 7}
        for times in ((0, 10), (9, 12), (12, 15))
    ]
    elsewhere = {**entry("mm", 2, 11, "kernel"), "pid": 0, "tid": 8}
    found = [one for one in renumbered([*kernels, elsewhere], 0, "a", 0.0) if one["ph"] == "X"]
    assert [(one["ts"] / MS, one["dur"] / MS) for one in found] == [(0, 9), (9, 3), (12, 3), (2, 9)]
