"""A hostile checkpoint: its manifest is well-formed and has the right digest, and lies about
everything else.

`verify` names it, resume skips it, load refuses it; none of them hangs, crashes or reads anything
outside of it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import MAX_BITS, parse_json
from drumline.checkpoint import store
from drumline.checkpoint.optimizer_state import encode_state
from drumline.checkpoint.state import load_checkpoint
from drumline.rank.determinism import RNG_BYTES, capture_rng, restore_rng
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog, manifest
from drumline.runs.events import read_events
from drumline.runs.manifest import CorruptCheckpointError
from drumline.runs.run_folder import RunFolder
from drumline.training.resume import find_newest
from tests.attacks.limits import bounded
from tests.jobs import Classify, make_config, train_here

CPU = torch.device("cpu")


def saved(root: Path, step: int) -> Path:
    progress = {"step": step, "cursor": {"epoch": 0, "position": step}}
    documents = {"progress": progress, "model": {"aliases": {}}}
    return store.write(
        root,
        step,
        tensors={"model": {"weight": torch.ones(2)}},
        documents=documents,
        metrics={"loss": 1.0},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Step 1 is whole; step 2 is for the attacker."""
    folder = RunFolder(tmp_path / "run")
    folder.make()
    for step in (1, 2):
        saved(folder.checkpoints, step)
    return folder


def hostile(run: RunFolder) -> Path:
    return run.checkpoints / "step-00000002"


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A manifest of the attacker's, with a digest that fits."""
    content = json.loads((path / "manifest.json").read_bytes())
    content.pop("digest")
    content = change(content) or content
    (path / "manifest.json").write_bytes(
        manifest._to_bytes({**content, "digest": manifest._digest(content)})
    )


def named(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["files"].update({name: {"bytes": 0, "blake3": "00"}})


def checked(run: RunFolder) -> str:
    """What `verify` says, once all three readers have held."""
    with bounded():
        findings = verify_run(run.path, lambda _: None).problems
        assert catalog.newest_valid(run.checkpoints).path == run.checkpoints / "step-00000001"
        with pytest.raises(CheckpointError):
            load_checkpoint(hostile(run), torch.nn.Linear(1, 1))
        load = torch.nn.Module()
        load.weight = torch.nn.Parameter(torch.zeros(2))
        load_checkpoint(run.path, load)
    assert load.weight.tolist() == [1.0, 1.0]  # of step 1
    (found,) = [finding for finding in findings if finding.where == "checkpoints/step-00000002"]
    return found.what


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no files": (
        lambda content: content.pop("files") and None,
        "Object missing required field `files`",
    ),
    "files as a list": (
        lambda content: content.update(files=[1]),
        "Expected `object`, got `array` - at `$.files`",
    ),
    "no step": (
        lambda content: content.pop("step") and None,
        "Object missing required field `step`",
    ),
    "step as text": (
        lambda content: content.update(step="2"),
        "Expected `int`, got `str` - at `$.step`",
    ),
    "step as a truth": (
        lambda content: content.update(step=True),
        "Expected `int`, got `bool` - at `$.step`",
    ),
    "step below zero": (lambda content: content.update(step=-2), "its step is -2"),
    "metrics as a list": (
        lambda content: content.update(metrics=[1]),
        "Expected `object`, got `array` - at `$.metrics`",
    ),
    "metrics as text": (
        lambda content: content.update(metrics={"loss": "low"}),
        "Expected `float`, got `str` - at `$.metrics[...]`",
    ),
    "created as a number": (
        lambda content: content.update(created=7),
        "Expected `str`, got `int` - at `$.created`",
    ),
    "non_finite as a list": (
        lambda content: content.update(non_finite=[]),
        "Expected `str | null`, got `array` - at `$.non_finite`",
    ),
    "an entry as text": (
        lambda content: content["files"].update(x="y"),
        "Expected `object`, got `str` - at `$.files[...]`",
    ),
    "an entry without a size": (
        lambda content: content["files"].update(x={"blake3": ""}),
        "Object missing required field `bytes` - at `$.files[...]`",
    ),
    "a size below zero": (
        lambda content: content["files"].update(x={"bytes": -1, "blake3": ""}),
        "the size of x is -1",
    ),
    "a device": (named("/dev/zero"), "the file name '/dev/zero' has characters other"),
    "a path upwards": (named("../step-00000001/model.json"), "has characters other"),
    "the folder itself": (named("."), "has characters other"),
    "the folder above": (named(".."), "has characters other"),
    "a line break": (named("x\ny"), "has characters other"),
    "an escape": (named("\x1b[2J"), "has characters other"),
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_manifest_is_a_corrupt_checkpoint(run: RunFolder, attack: str) -> None:
    change, sentence = FORGED[attack]
    forge(hostile(run), change)
    assert sentence in checked(run)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[" * 100_000, "manifest.json: unreadable"),
        (b'{"a":' * 100_000, "manifest.json: unreadable"),
        (b'{"step": ' + b"7" * 6000 + b"}", "manifest.json: unreadable"),
        (b'{"step": ' + b"7" * 4000 + b"}", "manifest.json: unreadable"),
        (b"7", "manifest.json: unreadable"),
        (b"\xff\xfe{\0}\0", "manifest.json: unreadable"),
    ],
    ids=["lists", "objects", "6,000 digits", "4,000 digits", "a number", "UTF-16"],
)
def test_a_manifest_that_is_hard_to_decode_is_a_corrupt_checkpoint(
    run: RunFolder, content: bytes, sentence: str
) -> None:
    (hostile(run) / "manifest.json").write_bytes(content)
    assert sentence in checked(run)


PLACES = ["manifest.json", "progress.json", "model.json", "model.safetensors"]


@pytest.mark.parametrize("name", PLACES)
def test_a_fifo_is_not_waited_for(run: RunFolder, name: str) -> None:
    (hostile(run) / name).unlink()
    os.mkfifo(hostile(run) / name)
    assert name in checked(run)


@pytest.mark.parametrize("name", PLACES)
def test_a_link_to_an_endless_device_is_not_read(run: RunFolder, name: str) -> None:
    (hostile(run) / name).unlink()
    (hostile(run) / name).symlink_to("/dev/zero")
    forge(
        hostile(run), lambda content: content["files"].update({name: {"bytes": 9, "blake3": ""}})
    ) if (name != "manifest.json") else None
    assert name in checked(run)


def test_a_link_to_a_file_outside_is_not_read(run: RunFolder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (hostile(run) / "progress.json").rename(secret)
    (hostile(run) / "progress.json").symlink_to(secret)
    forge(
        hostile(run),
        lambda content: content["files"]["progress.json"].update(bytes=len(str(secret))),
    )
    assert checked(run).endswith(
        "progress.json cannot be read: it is a symbolic link, not a regular file"
    )


def test_a_document_that_is_hard_to_decode_is_refused(run: RunFolder) -> None:
    raw = b"[" * 100_000
    path = hostile(run)
    record = manifest.FileRecord(len(raw), blake3(raw).hexdigest())
    (path / "model.json").write_bytes(raw)
    forge(
        path,
        lambda content: content["files"].update(
            {"model.json": {"bytes": record.size, "blake3": record.blake3}}
        ),
    )
    with bounded(), pytest.raises(CorruptCheckpointError, match="nested deeper than 200 levels"):
        load_checkpoint(path, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    "documents",
    [
        {},
        {"model": 7},
        {"model": {}},
        {"model": {"aliases": 7}},
        {"model": {"aliases": [7]}},
        {"model": {"aliases": {}}, "optimizer": 7},
        {"model": {"aliases": {}}, "optimizer": {}},
        {"model": {"aliases": {}}, "optimizer": {"class": "SGD", "groups": 7, "state": 7}},
    ],
)
def test_documents_of_other_types_are_an_error(tmp_path: Path, documents: dict[str, Any]) -> None:
    model = torch.nn.Linear(1, 1)
    tensors = {"model": model.state_dict(), "optimizer": {}}
    path = store.write(tmp_path, 1, tensors=tensors, documents=documents, metrics={})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with bounded(), pytest.raises(CheckpointError):
        load_checkpoint(path, model, optimizer)


def test_what_can_be_saved_can_be_loaded() -> None:
    value = -(2**MAX_BITS - 1)
    assert parse_json(json.dumps(encode_state(value, "x", {}))) == value
    with pytest.raises(CheckpointError, match="x cannot be saved: it is an integer of 991 bits"):
        encode_state(2**MAX_BITS, "x", {})


# Random states: numpy and torch read behind their tables where a position is wrong.

HEADER = struct.Struct("<8sI4I")
TORCH_BYTES = 5056
NUMPY_AT = HEADER.size + TORCH_BYTES
POSITION_AT = NUMPY_AT + 624 * 4
HAS_GAUSS_AT = NUMPY_AT + 625 * 4


def altered(offset: int, value: bytes) -> torch.Tensor:
    state = capture_rng(CPU).clone()
    state[offset : offset + len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return state


def number(value: int) -> bytes:
    return struct.pack("<i", value)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (altered(POSITION_AT, number(625)), "a position is outside its table"),
        (altered(POSITION_AT, number(2**30)), "a position is outside its table"),
        (altered(POSITION_AT, number(-5)), "a position is outside its table"),
        (altered(HAS_GAUSS_AT, number(9)), "a position is outside its table"),
        (
            altered(HEADER.size + 8, number(600) + number(1) + struct.pack("<Q", 624)),
            "a position is outside its table",
        ),
        (altered(HEADER.size + 8, number(0)), "a position is outside its table"),
        (altered(HEADER.size + 8, number(1) + number(0)), "a position is outside its table"),
        (
            altered(12, number(8)),
            "no random state",
        ),
        (altered(16, struct.pack("<I", 2**31)), "no random state"),
        (altered(20, number(3)), "no random state"),
        (altered(24, number(3)), "no random state"),
        (
            altered(NUMPY_AT + 624 * 4 + 16 + 624 * 4, number(2**30)),
            "a position is outside its table",
        ),
        (torch.zeros(RNG_BYTES, dtype=torch.uint8), "no random state"),
        (torch.zeros(3), "no random state"),
    ],
)
def test_a_forged_random_state_is_refused_before_any_of_it_is_set(
    state: torch.Tensor, sentence: str
) -> None:
    before = capture_rng(CPU)
    with pytest.raises(CheckpointError, match=f"the saved random state is corrupt: .*{sentence}"):
        restore_rng(state, CPU)
    assert torch.equal(capture_rng(CPU), before)
    restore_rng(before, CPU)
    assert np.random.get_state(legacy=False)["state"]["pos"] <= 624


FACTS = {"task": "x", "config": {"optim.name": "sgd"}, "world_size": 1, "batch_size": 8}
SAVED = {"step": 3, "cursor": {"epoch": 0, "position": 0}, "facts": FACTS}
WRONG: list[Any] = [
    7,
    [],
    {},
    {"facts": []},
    {"facts": {}},
    {"facts": {**FACTS, "config": {}}},
    {"facts": {**FACTS, "config": {"optim.name": []}}},
    {"facts": {**FACTS, "task": None}},
    {"facts": {**FACTS, "world_size": "2"}},
    {"cursor": {"epoch": 0}},
    {"cursor": {"epoch": 0, "x": 1}},
    {"cursor": {"epoch": 0, "position": 2**70}},
    {"step": "3"},
    {"step": 3},
    {"stopped": "yes"},
    {"stopped": {"reason": "enough", "total_steps": "10"}},
    {"stopped": {"reason": "enough", "length": 10}},
    {"stopped": {}},
    {"stopped": 0},
    {"stop_asked": 7},
]


def save(
    run: RunFolder, step: int, progress: Any, rng: dict[str, torch.Tensor], **more: dict[str, Any]
) -> None:
    documents = {"model": {"aliases": {}}, "optimizer": {}, "progress": progress}
    tensors: dict[str, Any] = {"model": {}, "optimizer": {}, "rng": rng, **more}
    store.write(run.checkpoints, step, tensors=tensors, documents=documents, metrics={})


def test_resume_skips_a_checkpoint_with_a_forged_content(run: RunFolder) -> None:
    """Its checksums are right: whoever forged it made them."""
    own = {"rank-00000": capture_rng(CPU)}
    save(run, 3, SAVED, own)
    for step, wrong in enumerate(WRONG, start=4):
        progress = {**SAVED, "step": step, **wrong} if wrong and isinstance(wrong, dict) else wrong
        save(run, step, progress, own)
    states = {
        "a position is outside its table": altered(POSITION_AT, number(700)),
        "it is a random state of another version of Drumline (format 7, expected 1)": altered(
            8, number(7)
        ),
        "it is no random state (0 bytes)": torch.zeros(RNG_BYTES, dtype=torch.bfloat16),
    }
    for step, state in enumerate(states.values(), start=100):
        save(run, step, {**SAVED, "step": step}, {**own, "rank-00001": state})
    documents = {"progress": {**SAVED, "step": 200}}
    store.write(run.checkpoints, 200, tensors={"model": {}}, documents=documents, metrics={})
    newest_step = find_newest(Alone(), run.checkpoints)  # type: ignore[arg-type]
    assert newest_step is not None
    assert newest_step.progress.step == 3
    reasons = [reason for _, reason in newest_step.skipped]
    assert reasons[0] == "it does not hold a model, an optimizer, random states and progress"
    assert reasons[1:4] == [f"rng.safetensors: {reason}" for reason in reversed(states)]
    assert set(reasons[4:]) <= {"progress.json does not have the run's position", reasons[0]}
    assert len(reasons) == 1 + len(states) + len(WRONG)


def test_a_run_continues_from_the_newest_checkpoint_that_is_its_own(tmp_path: Path) -> None:
    config = make_config(steps=3)
    train_here(config, Classify, tmp_path)
    save(
        RunFolder(tmp_path),
        50,
        {**SAVED, "step": 50, "facts": {}},
        {"rank-00000": capture_rng(CPU)},
    )
    train_here(config, Classify, tmp_path)
    events = list(read_events(RunFolder(tmp_path).event_file(0)))
    assert [event["step"] for event in events if event["kind"] == "resume"] == [3]
    assert [event["step"] for event in events if event["kind"] == "end"] == [3, 3]


class Alone:
    """The only rank."""

    device = CPU

    def is_main_process(self) -> bool:
        return True


def test_such_a_state_would_have_read_behind_the_table() -> None:
    """What numpy does with it, in a process of its own."""
    code = (
        "import numpy as np; state = np.random.get_state(legacy=False); state['state']['pos'] = 2**30\n"
        "np.random.set_state(state); np.random.random()"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL
        ).returncode
        < 0
    )


def test_a_large_position_is_not_parsed(run: RunFolder) -> None:
    """As values in memory it would be thirty times as large."""
    content = b"[" + b"[]," * (4 << 20) + b"[]]"
    (hostile(run) / "progress.json").write_bytes(content)
    record = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    forge(hostile(run), lambda manifest: manifest["files"].update({"progress.json": record}))
    with bounded(cpu_s=5, megabytes=200):
        problems = verify_run(run.path, lambda _: None).problems
        with pytest.raises(
            CorruptCheckpointError,
            match=r"progress.json cannot be read: it has more than 8,388,608 bytes",
        ):
            catalog.read_document(hostile(run), "progress")
    assert ("checkpoints/step-00000002/progress.json", "has no valid step and position") in [
        (problem.where, problem.what) for problem in problems
    ]
