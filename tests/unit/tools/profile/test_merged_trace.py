"""The trace of all ranks: one process for each rank and its GPU, times by one clock, flows that
stay apart; by the trace event format, as Perfetto's JSON importer reads it (test_perfetto.py opens
traces in Perfetto itself)."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from drumline.tools.profile.profile_analysis import (
    EARLY_US,
    PROCESSES,
    MergedRank,
    analyse,
    merged_trace,
)
from drumline.tools.profile.trace_file import TraceEntry
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
    content = gzip.decompress((run / "profile/merged.trace.json.gz").read_bytes())
    entries: list[Entry] = json.loads(content)["traceEvents"]
    return entries


def of_one_rank(run: Path, rank: int, trace: Sequence[Entry], shift_s: float = 0.0) -> list[Entry]:
    """The merged trace of this rank alone."""
    (run / "profile").mkdir()
    entries = msgspec.json.decode(json.dumps(trace), type=list[TraceEntry])
    with (
        merged_trace(run / "profile") as document,
        closing(MergedRank(document, rank, "a")) as merged_rank,
    ):
        merged_rank.add(entries, shift_s)
    return merged(run)


def processes_of(path: Path) -> list[str]:
    """The names of the processes in a merged trace, whose entries are checked against the
    format."""
    entries = merged(path.parents[1])
    names = {
        entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"
    }
    ranks_of_flow: dict[int, set[int]] = defaultdict(set)
    for merged_entry in entries:
        assert (
            type(merged_entry["pid"]),
            type(merged_entry["tid"]),
            type(merged_entry["name"]),
        ) == (int, int, str), merged_entry
        assert merged_entry["pid"] in names, merged_entry
        assert 0 <= merged_entry["ts"] < math.inf, merged_entry
        if merged_entry["ph"] == "X":
            assert merged_entry["dur"] >= 0, merged_entry
        elif merged_entry["ph"] in "stf":
            assert type(merged_entry["id"]) is int, merged_entry
            ranks_of_flow[merged_entry["id"]].add(merged_entry["pid"] // PROCESSES)
        elif merged_entry["ph"] == "M":
            assert merged_entry["name"] in ("process_name", "process_sort_index", "thread_name"), (
                merged_entry
            )
            assert set(merged_entry["args"]) <= {"name", "sort_index"}, merged_entry
        else:
            assert merged_entry["ph"] == "i", merged_entry
    assert all(len(ranks) == 1 for ranks in ranks_of_flow.values())
    return [names[number] for number in sorted(names)]


def test_ranks_of_two_hosts_are_by_one_clock(tmp_path: Path) -> None:
    two_ranks(tmp_path, later_ms=5000, host="b")
    entries = merged(tmp_path)
    reduced = [entry for entry in entries if entry["name"] == "gloo:all_reduce"]
    assert sorted(entry["pid"] for entry in reduced) == [100, 100, 200, 200]
    ends = {
        (entry["pid"], round((entry["ts"] - EARLY_US + entry["dur"]) / MS)) for entry in reduced
    }
    assert ends == {(100, 80), (100, 180), (200, 80), (200, 180)}
    assert processes_of(tmp_path / "profile/merged.trace.json.gz") == ["rank 0 on a", "rank 1 on b"]


def test_a_merged_trace_of_gpus_has_the_format(tmp_path: Path) -> None:
    nccl_ranks(tmp_path, "item")
    names = ["rank 0 on a", "rank 0 on a, GPU 0", "rank 1 on a", "rank 1 on a, GPU 0"]
    assert processes_of(tmp_path / "profile/merged.trace.json.gz") == names


def test_streams_of_a_gpu_and_flows_belong_to_their_rank(tmp_path: Path) -> None:
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
    trace = [thread, unused, entry("aten::mm", 0, 1), kernel, flow, *own_rows, {"ph": "X"}]
    merged_entries = of_one_rank(tmp_path, 3, trace, shift_s=1e-5)
    assert [entry["pid"] for entry in merged_entries[:4]] == [400, 400, 400, 401]
    assert merged_entries[2]["id"] == (3 << 40) + 5, "Perfetto reads text as a hexadecimal number"
    assert merged_entries[1]["ts"] - EARLY_US == pytest.approx(10.0)
    assert [
        entry["args"]["name"] for entry in merged_entries if entry["name"] == "process_name"
    ] == ["rank 3 on a", "rank 3 on a, GPU 0"]


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
                "ts": moment * MS,
                "name": "fwdbwd",
                "cat": "fwdbwd",
                "bp": "e",
            }
            for phase, moment in (("s", 2), ("f", 42))
        ]
        write_rank(run, rank, [*steps, entry("MmBackward0", 40, 45), *arrows])
    analyse(run)


def test_flows_of_two_ranks_do_not_meet(tmp_path: Path) -> None:
    ranks_with_flows(tmp_path)
    assert processes_of(tmp_path / "profile/merged.trace.json.gz") == ["rank 0 on a", "rank 1 on a"]
    assert len({entry["id"] for entry in merged(tmp_path) if entry["ph"] in "sf"}) == 2


def test_a_kernel_ends_where_the_next_of_its_stream_begins(tmp_path: Path) -> None:
    kernels = [
        {**entry("mm", *times, "kernel"), "pid": 0, "tid": 7}
        for times in ((0, 10), (9, 12), (12, 15))
    ]
    elsewhere = {**entry("mm", 2, 11, "kernel"), "pid": 0, "tid": 8}
    entries = of_one_rank(tmp_path, 0, [*kernels, elsewhere])
    kernel_entries = [entry for entry in entries if entry["ph"] == "X"]
    times = [((entry["ts"] - EARLY_US) / MS, entry["dur"] / MS) for entry in kernel_entries]
    assert times == [(0, 9), (9, 3), (12, 3), (2, 9)]


def test_a_trace_that_cannot_be_analysed_is_merged(tmp_path: Path) -> None:
    """Its entries have been written when it turns out to have no steps."""
    step = [mark("drumline.step#2", 0, 50), mark("drumline.end", 50, 50), entry("aten::mm", 0, 30)]
    operations = [entry(f"aten::{number**5}", number, number + 1) for number in range(10_000)]
    write_rank(tmp_path, 0, operations, world_size=3)
    write_rank(tmp_path, 1, step, world_size=3)
    write_rank(tmp_path, 2, [*step, *operations[:20]], world_size=3)
    assert list(analyse(tmp_path).missing_ranks) == ["0"]
    names = processes_of(tmp_path / "profile/merged.trace.json.gz")
    assert names == ["rank 0 on a", "rank 1 on a", "rank 2 on a"]
    assert len([entry for entry in merged(tmp_path) if entry["ph"] == "X"]) == 10_000 + 3 + 3 + 20
