"""Which files of a folder are code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from drumline.errors import UsageError
from drumline.launch.hosts import Host
from drumline.launch.ssh.sync import Sync
from drumline.launch.ssh.tree import code_files, digests, is_excluded, tree_digest


def make(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


def test_what_is_no_code_is_left_out(tmp_path: Path) -> None:
    make(
        tmp_path,
        "a.py",
        "sub/b.py",
        "runs/x",
        "sub/__pycache__/b.pyc",
        "data/big.bin",
        "sub/data/kept",
        ".venv/y",
    )
    (tmp_path / "link").symlink_to("sub")
    assert code_files(tmp_path, ["data/big.*"]) == ["a.py", "link", "sub/b.py", "sub/data/kept"]
    assert code_files(tmp_path, ["data/"]) == ["a.py", "link", "sub/b.py"]


def test_in_a_repository_git_says_what_is_ignored(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "out/x", "sub/b.py")
    (tmp_path / ".gitignore").write_text("out\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert code_files(tmp_path) == [".gitignore", "a.py", "sub/b.py"]


def test_a_pattern_is_a_name_anywhere_or_a_path_from_the_top() -> None:
    assert is_excluded("a/runs/b", ["runs"])
    assert is_excluded("a/b/c", ["a/b"])
    assert not is_excluded("x/a/b/c", ["a/b"])
    assert not is_excluded("reruns", ["runs"])


def test_one_changed_byte_changes_the_hash(tmp_path: Path) -> None:
    make(tmp_path, "a", "b")
    before = digests(tmp_path, ["a", "b", "gone"])
    assert before.keys() == {"a", "b"}
    (tmp_path / "b").write_text("B")
    assert tree_digest(digests(tmp_path, ["a", "b"])) != tree_digest(before)


def test_a_whole_home_and_an_empty_folder_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no file to copy in"):
        Sync(tmp_path, ["ssh"], "python").run([Host("a")])
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=f"--sync would copy all of {tmp_path}"):
        Sync(tmp_path, ["ssh"], "python").run([Host("a")])
