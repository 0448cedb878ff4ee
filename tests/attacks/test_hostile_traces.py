"""Traces in a run folder of somebody else: a few kB that would be a GB in memory are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from drumline.tools.profile.trace_file import columns_of, read_parts
from tests.attacks.limits import bounded


def write_trace(path: Path, count: int, value: bytes) -> Path:
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + value * count + b"{}]}"))
    return path


@pytest.mark.parametrize(
    ("count", "value", "sentence"),
    [
        (30_000_000, b" ", "it has more than 10,[0-9,]+ bytes"),
        (2_500_000, b"{},", "it has [0-9,]+ objects and lists in [0-9,]+ bytes, more than a trace"),
    ],
    ids=["packed tightly", "empty values"],
)
def test_a_small_file_does_not_take_much_memory(
    tmp_path: Path, count: int, value: bytes, sentence: str
) -> None:
    path = write_trace(tmp_path / "trace.json.gz", count, value)
    assert path.stat().st_size < 40_000
    with bounded(cpu_s=10, megabytes=100), pytest.raises(ValueError, match=sentence):
        list(read_parts(path))


def test_a_small_trace_may_be_packed_tightly(tmp_path: Path) -> None:
    event = b'{"ph": "X", "ts": 1, "dur": 1, "name": "a", "args": {}}, '
    path = write_trace(tmp_path / "trace.json.gz", 50_000, event)
    assert len(columns_of(read_parts(path))) == 50_000
