"""A colleague hands over a run folder and its mirror in an object store: nothing is written outside
the run folder."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.base.errors import CheckpointError, UsageError
from drumline.base.untrusted import DOCUMENT_BYTES
from drumline.checkpoint import store
from drumline.checkpoint.mirror import restore_run
from drumline.checkpoint.mirrored_run import MARKER, MirroredRun
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog, manifest
from drumline.runs.manifest import CorruptCheckpointError
from drumline.storage.backends import PIECE_BYTES
from drumline.storage.object_store import open_store

OLD_ID = "0" * 16
NEW_ID = "1" * 16


def write_checkpoint(root: Path, step: int) -> None:
    tensors = {"model": {"w": torch.zeros(2)}}
    store.write(
        root,
        step,
        tensors=tensors,
        documents={"progress": {"step": step, "cursor": {"epoch": 0, "position": step}}},
        metrics={},
    )


class Attack:
    """A run folder and its mirror, prepared so that the run seems to have continued elsewhere, and
    the folder's files are set aside in `before-ID`."""

    def __init__(self, folder: Path, run_id: object) -> None:
        self.victim = folder / "victim"
        self.victim.mkdir()
        (self.victim / "config.toml").write_text("precious")
        self.run_folder = folder / "run"
        mirror_folder = folder / "mirror"
        write_checkpoint(self.run_folder / "checkpoints", 1)
        write_checkpoint(mirror_folder / "checkpoints", 2)
        (self.run_folder / "config.toml").write_text("evil")
        self.run = MirroredRun(open_store(f"file://{mirror_folder}"))
        marker = {"url": self.run.store.url, "id": run_id, "after": None}
        (self.run_folder / MARKER).write_text(json.dumps(marker))
        (mirror_folder / MARKER).write_text(json.dumps({"ids": [run_id, NEW_ID]}))

    def restore(self) -> str:
        return restore_run(self.run, self.run_folder)[0]

    @property
    def has_failed(self) -> bool:
        names = [path.name for path in self.victim.iterdir()]
        return names == ["config.toml"] and (self.victim / "config.toml").read_text() == "precious"


def test_the_attack_is_a_real_one_but_for_its_id(tmp_path: Path) -> None:
    attack = Attack(tmp_path, OLD_ID)
    assert f"what was here is in {attack.run_folder / f'before-{OLD_ID}'}" in attack.restore()
    assert (attack.run_folder / f"before-{OLD_ID}" / "config.toml").read_text() == "evil"
    assert attack.has_failed


@pytest.mark.parametrize(
    "run_id",
    ["x/../../victim", "../../victim", f"{OLD_ID}/../../victim", f"{OLD_ID}\n", 3, "A" * 16],
)
def test_an_id_that_is_a_path_is_no_id(tmp_path: Path, run_id: object) -> None:
    attack = Attack(tmp_path, run_id)
    (attack.run_folder / f"before-{str(run_id).partition('/')[0]}").mkdir()
    with pytest.raises(
        UsageError, match=r"has checkpoints, and they are not of the run in .*run\n  try: give"
    ):
        attack.restore()
    assert attack.has_failed


def test_a_link_in_place_of_the_folder_to_set_aside_to_is_not_followed(tmp_path: Path) -> None:
    attack = Attack(tmp_path, OLD_ID)
    aside = attack.run_folder / f"before-{OLD_ID}"
    aside.symlink_to(attack.victim)
    with pytest.raises(CheckpointError) as caught:
        attack.restore()
    assert str(caught.value) == (
        f"{aside} cannot be used: it is a symbolic link, not a folder\n"
        "  try: move it away, or resume in another --run DIR"
    )
    assert attack.has_failed
    # nothing was moved
    assert (attack.run_folder / "config.toml").read_text() == "evil"


def test_a_folder_of_another_user_to_set_aside_to_is_refused(
    tmp_path: Path, other_user: int
) -> None:
    attack = Attack(tmp_path, OLD_ID)
    aside = attack.run_folder / f"before-{OLD_ID}"
    aside.mkdir()
    os.chown(aside, other_user, other_user)
    with pytest.raises(
        CheckpointError,
        match=rf"before-{OLD_ID} cannot be used: it belongs to user id {other_user}, ",
    ):
        attack.restore()
    assert list(aside.iterdir()) == []


# Objects that are larger, or have longer names, than they may


def restored(folder: Path, mirror: Path) -> tuple[str, list[str]]:
    return restore_run(MirroredRun(open_store(f"file://{mirror}")), folder)


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest of the attacker's, with a digest that fits."""
    content = json.loads((checkpoint / manifest.FILE_NAME).read_bytes())
    del content["digest"]
    change(content)
    forged = {**content, "digest": manifest._digest(content)}
    (checkpoint / manifest.FILE_NAME).write_bytes(manifest._to_bytes(forged))


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """Step 1 is whole; step 2 is for the attacker."""
    for step in (1, 2):
        write_checkpoint(tmp_path / "mirror" / "checkpoints", step)
    return tmp_path / "mirror"


def test_an_object_is_not_written_beyond_its_size(tmp_path: Path, mirror: Path) -> None:
    hostile = mirror / "checkpoints" / "step-00000002" / "model.safetensors"
    size = hostile.stat().st_size
    with hostile.open("ab") as file:
        file.truncate(3 * PIECE_BYTES)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE_BYTES, limit[1]))
    try:
        note, skipped = restored(tmp_path / "run", mirror)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert note.startswith("restored step 1 ")
    assert skipped == [
        f"step 2 of file://{mirror} was skipped: file://{mirror}/checkpoints/step-00000002/model.safetensors is "
        f"corrupt: it has more than {size:,} bytes"
    ]


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a long file name": (
        lambda content: content["files"].update({"x" * 250: {"bytes": 0, "blake3": "0"}}),
        "a file name has 250 characters, and 200 at most are allowed",
    ),
    "a step of many digits": (
        lambda content: content.update(step=10**260),
        f"its step is 1{'0' * 260}",
    ),
}


@pytest.mark.parametrize(("change", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_an_older_checkpoint_is_restored_in_place_of_a_hostile_one(
    tmp_path: Path, mirror: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    hostile = mirror / "checkpoints" / "step-00000002"
    forge(hostile, change)
    note, skipped = restored(tmp_path / "run", mirror)
    assert note.startswith("restored step 1 ")
    assert skipped == [f"step 2 of file://{mirror} was skipped: manifest.json: {reason}"]
    with pytest.raises(CorruptCheckpointError, match=re.escape(reason)):
        catalog.verify(hostile)


def hostile_names(root: Path) -> None:
    """Objects that a store allows, and no file system."""
    for name in (
        f"checkpoints/step-{'9' * 240}/manifest.json",
        f"events/{'x' * 244}.jsonl",
        f"diagnoses/{'x' * 245}.json",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}\n")


def test_names_that_are_too_long_end_no_command(tmp_path: Path, mirror: Path) -> None:
    hostile_names(mirror)
    assert restored(tmp_path / "run", mirror)[0].startswith("restored step 2 ")
    hostile_names(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / f".step-{'9' * 230}.replaced").mkdir()
    report = verify_run(tmp_path / "run", lambda _: None)
    assert report.last_valid_step == 2
    assert (
        catalog.newest_valid(tmp_path / "run" / "checkpoints").path
        == tmp_path / "run" / "checkpoints" / "step-00000002"
    )


@pytest.mark.parametrize("name", ["progress.json", "manifest.json"])
def test_a_large_document_is_not_fetched_to_inspect_a_run(
    tmp_path: Path, mirror: Path, name: str
) -> None:
    with (mirror / "checkpoints" / "step-00000002" / name).open("ab") as file:
        file.truncate(DOCUMENT_BYTES + 1)
    (mirror / "config.toml").touch()
    MirroredRun(open_store(f"file://{mirror}")).fetch_outline(tmp_path / "outline")
    assert (tmp_path / "outline" / "checkpoints" / "step-00000001" / "progress.json").exists()
    assert not (tmp_path / "outline" / "checkpoints" / "step-00000002" / name).exists()
