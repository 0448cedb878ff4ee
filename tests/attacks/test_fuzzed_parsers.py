"""Every parser of what another process or user wrote, on anything: its own kind of error or a
result; never a crash, a hang or much memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.base.errors import DrumlineError
from drumline.base.rank_environment import read_failure
from drumline.base.untrusted import parse_json, parse_toml
from drumline.config.config_file import read_config_file as read_settings
from drumline.data.cifar10 import read_python_batch
from drumline.launch.env_file import read_env_file
from drumline.launch.hosts import hosts_from_file
from drumline.net.frames import FrameError, decode
from drumline.report.verify.run_check import verify_run
from drumline.runs import manifest
from drumline.runs.events import Reporter, read_json_lines
from drumline.runs.run_folder import RunFolder
from drumline.training.output import WatchNotices
from drumline.training.resume import _failure_in, _read_launch, check_same_step, diagnoses_of_launch
from drumline.watch.heartbeat import read_heartbeat
from drumline.watch.run_status import RunStatusReader
from drumline.watch.status_file import read_status_file
from drumline.watch.status_table import all_rows, summary_line
from drumline_lint.reading.notebook import read_notebook
from drumline_lint.reading.parse import read_bytes
from tests.attacks.limits import bounded

NUMBERS = st.integers() | st.floats() | st.just(10**400) | st.just(-1) | st.just(2**63)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text(max_size=8)
    | st.sampled_from(["x", "1", "", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
# Words that parsers know, in any order: much deeper than random bytes get.
LONG = [b"7" * 400, b" " * 3000, b"\\" * 3000, b"a" * 3000, b"[" * 3000, b"a." * 200]
KNOWN = b"[ ] { } \" ' \\ = # . , : - 0x1 export [train] seed 1e999 NaN null %%time !ls ?".split()
NAMES = [b"NODE_RANK", b"MASTER_PORT", b"slots=3"]
ODD = [
    b" ",
    b"\n",
    b"\xff",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b'{"kind":"start","step":',
    b'"cells":',
    b'"source":',
]
WORDS = st.sampled_from([*LONG, *KNOWN, *NAMES, *ODD])
TEXTS = st.binary(max_size=200) | st.lists(WORDS, max_size=25).map(b"".join)
OPCODES = st.sampled_from(
    [bytes([code]) for code in b"\x80\x95(}])t\x85\x86\x87aesuN\x88\x89JKMUTCBX\x8cqrhjcRb."]
)
PICKLES = st.lists(OPCODES | st.binary(max_size=4) | st.just(b"cnumpy\ndtype\n"), max_size=40).map(
    b"".join
)


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(suppress_health_check=checks, derandomize=True)(test)


def of_a_file(read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    def check(folder: Path, data: bytes) -> Any:
        (folder / "file").write_bytes(data)
        return read(folder / "file")

    return check


def _verified(folder: Path, data: bytes) -> None:
    run = RunFolder(folder)
    run.make()
    for file in (
        run.config_file,
        run.environment_file,
        run.ledger,
        run.event_file(0),
        run.event_file(1),
    ):
        file.write_bytes(data)
    (run.path / ".lock").write_bytes(data)
    checkpoint = run.checkpoints / "step-00000001"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "manifest.json").write_bytes(data)
    verify_run(folder, lambda _: None)


PARSERS: dict[str, tuple[Callable[[Path, bytes], Any], tuple[type[Exception], ...]]] = {
    "JSON": (lambda _, data: parse_json(data), (ValueError,)),
    "TOML": (lambda _, data: parse_toml(data.decode(errors="replace")), (ValueError,)),
    "a frame": (lambda _, data: decode(data), (FrameError,)),
    "a manifest": (lambda _, data: manifest.parse(data), (ValueError,)),
    "an env file": (of_a_file(read_env_file), (DrumlineError,)),
    "a hostfile": (of_a_file(hosts_from_file), (DrumlineError,)),
    "settings": (of_a_file(read_settings), ()),
    "events": (of_a_file(lambda path: list(read_json_lines(path))), ()),
    "a status": (of_a_file(read_status_file), ()),
    "a heartbeat": (of_a_file(read_heartbeat), ()),
    "a failure": (of_a_file(read_failure), ()),
    "a launch": (of_a_file(_read_launch), ()),
    "a notebook": (lambda _, data: read_notebook(Path("a.ipynb"), data), ()),
    "code": (lambda _, data: read_bytes(Path("a.py"), data), ()),
    "a script": (lambda _, data: read_bytes(Path("a.sh"), data), ()),
    "a pickle": (of_a_file(read_python_batch), (DrumlineError,)),
    "a run folder": (_verified, ()),
}


@pytest.mark.parametrize("name", PARSERS)
@fuzzed
@given(data=TEXTS | PICKLES)
def test_any_bytes(tmp_path: Path, name: str, data: bytes) -> None:
    parse, errors = PARSERS[name]
    with bounded(megabytes=200), contextlib.suppress(*errors):
        parse(tmp_path, data)


def shaped(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that have the right fields, with anything in them."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUES))


@fuzzed
@given(
    content=shaped("format", "step", "created", "metrics", "files", "non_finite"),
    right=st.booleans(),
)
def test_manifests(content: dict[str, Any], right: bool) -> None:
    content = {
        **content,
        **({"format": 1, "step": 3, "created": "", "metrics": {}} if right else {}),
    }
    try:
        raw = manifest._to_bytes({**content, "digest": manifest._digest(content)})
    except UnicodeEncodeError:
        return
    with bounded():
        try:
            parsed = manifest.parse(raw)
        except ValueError:
            return
    assert type(parsed.step) is int
    assert all(manifest.NAME.fullmatch(name) for name in parsed.files)


ROW = ("rank", "host", "step", "phase", "age_s", "rate", "state", "cpu", "exit", "failure")
STATUS = ("time", "leader", "world_size", "hang_s", "lost", "notices", "has_ended")
GOOD_ROW = {
    "rank": 0,
    "host": "a",
    "step": 1,
    "phase": "x",
    "age_s": 9,
    "rate": 1.0,
    "state": "S",
    "cpu": 0,
}
GOOD = {
    "version": 3,
    "time": 1,
    "leader": "",
    "world_size": 1,
    "hang_s": 1,
    "lost": [],
    "notices": [],
    "step_times": None,
    "has_ended": True,
}


@fuzzed
@given(changed=shaped(*STATUS), row=shaped(*ROW))
def test_statuses(tmp_path: Path, changed: dict[str, Any], row: dict[str, Any]) -> None:
    rows = [{**GOOD_ROW, "exit": None, "failure": None, **row}]
    for record in ({**GOOD, **changed, "ranks": rows}, {**GOOD, "ranks": rows}):
        (tmp_path / "status.json").write_text(json.dumps(record))
        with bounded():
            if (status_file := read_status_file(tmp_path / "status.json")) is not None:
                all_rows(status_file)
                summary_line(status_file)


LEDGER = (
    "kind",
    "step",
    "epoch",
    "position",
    "world_size",
    "batch_size",
    "samples",
    "seed",
    "first",
    "last",
    "ranks",
)
EVENT = ("kind", "number", "step", "world_size", "total_steps", "time", "metrics", "epoch")
START = {
    "kind": "start",
    "step": 0,
    "epoch": 0,
    "position": 0,
    "world_size": 1,
    "batch_size": 2,
    "samples": 4,
    "seed": 0,
}


@fuzzed
@given(
    ledger=st.lists(shaped(*LEDGER) | shaped("kind", "first", "last", "ranks"), max_size=3),
    events=st.lists(shaped(*EVENT), max_size=3),
    kind=st.sampled_from(["start", "steps", "resume", "checkpoint", "end", "preempted", "error"]),
)
def test_run_folders(tmp_path: Path, ledger: list[Any], events: list[Any], kind: str) -> None:
    run = RunFolder(tmp_path)
    run.make()
    starts = [START, *({**START, **record} for record in ledger), *ledger]
    run.ledger.write_text("".join(f"{json.dumps(record)}\n" for record in starts))
    lines = [
        {"kind": kind, "number": number, "step": 1, **event} for number, event in enumerate(events)
    ]
    run.event_file(0).write_text("".join(f"{json.dumps(record)}\n" for record in lines))
    run.environment_file.write_text(json.dumps({"ranks": events}))
    with bounded(cpu_s=2):
        verify_run(tmp_path, lambda _: None)
        assert RunStatusReader(tmp_path).read().has_ended


DIAGNOSIS = (
    "cause",
    "host",
    "rank",
    "step",
    "what",
    "next_step",
    "is_certain",
    "since_s",
    "num_blocked",
)
GOOD_DIAGNOSIS = {
    "cause": "unknown",
    "host": "a",
    "rank": 0,
    "step": 1,
    "what": "x",
    "next_step": "y",
}


@fuzzed
@given(
    record=shaped("alarm", "sentence", "action", "time", "number"),
    diagnosis=shaped(*DIAGNOSIS),
    notice=VALUES,
)
def test_diagnoses_and_notices(tmp_path: Path, record: Any, diagnosis: Any, notice: Any) -> None:
    good = {"alarm": "failure", "sentence": "x", "launch": "a", "action": "restart", "time": 1.0}
    inner = {**GOOD_DIAGNOSIS, "is_certain": True, "since_s": 1.0, **diagnosis}
    (tmp_path / "0001-unknown.json").write_text(json.dumps({**good, **record, "diagnosis": inner}))
    (tmp_path / "notices.jsonl").write_text(f"{json.dumps(notice)}\n")
    with bounded():
        diagnoses = diagnoses_of_launch(tmp_path, "a")
        check_same_step(diagnoses, tmp_path)
        for one in diagnoses:
            _failure_in(one)
        WatchNotices(tmp_path).report(Reporter([], rank=0, host="a"))
