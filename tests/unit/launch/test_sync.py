"""`--sync` that fails; what it copies is tested on real hosts, in `tests/multinode`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from drumline.base.errors import PreflightError, UsageError
from drumline.launch.hosts import Host
from drumline.launch.ssh.sync import code_files, copy_code, is_excluded


def test_hosts_that_fail_for_different_reasons_are_all_named(tmp_path: Path) -> None:
    code = tmp_path / "code"
    client = tmp_path / "ssh"
    code.mkdir()
    (code / "train.py").touch()
    client.write_text(
        """#!/bin/sh
case "$*" in
*"-- a "*) echo "Permission denied" >&2 ;;
*) echo "Connection refused" >&2 ;;
esac
exit 255
"""
    )
    client.chmod(0o755)
    with pytest.raises(PreflightError) as caught:
        copy_code(code, [str(client)], [Host("a"), Host("b")])
    assert caught.value.what == (
        "a: it rejected the ssh key (Permission denied); "
        "b: it refuses ssh connections (Connection refused)"
    )


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


def test_in_a_repository_git_decides_what_is_ignored(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "out/x", "sub/b.py")
    (tmp_path / ".gitignore").write_text("out\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert code_files(tmp_path) == [".gitignore", "a.py", "sub/b.py"]


def test_a_pattern_is_a_name_anywhere_or_a_path_from_the_top() -> None:
    assert is_excluded("a/runs/b", ["runs"])
    assert is_excluded("a/b/c", ["a/b"])
    assert not is_excluded("x/a/b/c", ["a/b"])
    assert not is_excluded("reruns", ["runs"])


def test_a_whole_home_and_an_empty_folder_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no file to copy in"):
        copy_code(tmp_path, ["ssh"], [Host("a")])
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=f"--sync would copy all of {tmp_path}"):
        copy_code(tmp_path, ["ssh"], [Host("a")])
