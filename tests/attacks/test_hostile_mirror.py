"""A colleague hands over a run folder and its mirror in an object store: nothing is written outside the run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from drumline.checkpoint import store
from drumline.checkpoint.mirror import restore_run
from drumline.checkpoint.mirrored_run import MARKER, MirroredRun
from drumline.errors import CheckpointError, UsageError
from drumline.storage.object_store import open_store

OLD_ID = "0" * 16
NEW_ID = "1" * 16


def write_checkpoint(root: Path, step: int) -> None:
    tensors = {"model": {"w": torch.zeros(2)}}
    store.write(root, step, tensors=tensors, documents={"progress": {"step": step}}, metrics={})


class Attack:
    """A run folder and its mirror, prepared so that the run seems to have continued elsewhere, and the folder's files
    are set aside in `before-ID`."""

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
    "run_id", ["x/../../victim", "../../victim", f"{OLD_ID}/../../victim", f"{OLD_ID}\n", 3, "A" * 16]
)
def test_an_id_that_is_a_path_is_no_id(tmp_path: Path, run_id: object) -> None:
    attack = Attack(tmp_path, run_id)
    (attack.run_folder / f"before-{str(run_id).partition('/')[0]}").mkdir()
    with pytest.raises(UsageError, match=r"has checkpoints, and they are not of the run in .*run\n  try: give"):
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
    assert (attack.run_folder / "config.toml").read_text() == "evil"  # nothing was moved


def test_a_folder_of_another_user_to_set_aside_to_is_refused(tmp_path: Path, other_user: int) -> None:
    attack = Attack(tmp_path, OLD_ID)
    aside = attack.run_folder / f"before-{OLD_ID}"
    aside.mkdir()
    os.chown(aside, other_user, other_user)
    with pytest.raises(CheckpointError, match=rf"before-{OLD_ID} cannot be used: it belongs to user id {other_user}, "):
        attack.restore()
    assert list(aside.iterdir()) == []
