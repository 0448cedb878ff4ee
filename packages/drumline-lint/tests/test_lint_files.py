"""Which files are read: by name, in folders, and none twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drumline_lint.errors import UsageError
from drumline_lint.reading.discovery import find_files


@pytest.fixture(name="tree")
def make_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        *(
            "b.py",
            "a.py",
            "notes.txt",
            "job.sbatch",
            "run.sh",
            "x.bash",
            "y.slurm",
            "n.ipynb",
            "tool",
            "k8s.yaml",
            "Dockerfile",
            "images/gpu.Dockerfile",
        ),
        *("pkg/inner.py", "pkg/deep/er.py", "pkg.py/odd.py"),
        *(".hidden/h.py", "venv/v.py", "node_modules/n.py", "build/b.py", "__pycache__/c.py"),
        *(
            "lib/site-packages/s.py",
            "own-env/pyvenv.cfg",
            "own-env/e.py",
            "vendor/v.py",
            "env/kept.py",
        ),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*paths: str, exclude: tuple[str, ...] = ()) -> list[str]:
    return [str(path) for path in find_files([Path(path) for path in paths], exclude=exclude).files]


@pytest.mark.usefixtures("tree")
def test_a_folder_is_walked_without_what_others_wrote() -> None:
    assert found(".") == [
        *("Dockerfile", "a.py", "b.py", "env/kept.py", "images/gpu.Dockerfile", "job.sbatch"),
        *("k8s.yaml", "n.ipynb", "pkg/deep/er.py", "pkg/inner.py", "pkg.py/odd.py", "run.sh"),
        *("vendor/v.py", "x.bash", "y.slurm"),
    ]


def test_a_program_without_an_ending_is_read_if_a_shell_runs_it(tree: Path) -> None:
    (tree / "pkg" / "launch").write_text("#!/usr/bin/env bash\ntorchrun train.py\n")
    (tree / "pkg" / "convert").write_text("#!/usr/bin/env python3\n")
    (tree / "pkg" / "launch.bak").write_text("#!/bin/bash\n")
    os.mkfifo(tree / "pkg" / "pipe")
    assert found("pkg") == ["pkg/deep/er.py", "pkg/inner.py", "pkg/launch"]


@pytest.mark.usefixtures("tree")
def test_what_is_given_by_name_is_always_read() -> None:
    assert found("notes.txt", "tool", "venv/v.py", ".hidden") == [
        ".hidden/h.py",
        "notes.txt",
        "tool",
        "venv/v.py",
    ]
    assert found("vendor/v.py", exclude=("vendor", "*.py")) == ["vendor/v.py"]


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("glob", "gone"),
    [
        ("vendor", {"vendor/v.py"}),
        ("vendor/", {"vendor/v.py"}),
        ("pkg/deep", {"pkg/deep/er.py"}),
        ("./pkg/*", {"pkg/deep/er.py", "pkg/inner.py"}),
        ("*.s*", {"job.sbatch", "run.sh", "y.slurm"}),
        ("inner.py", {"pkg/inner.py"}),
        ("deep/er.py", set()),
    ],
)
def test_exclude_leaves_out_names_and_paths(glob: str, gone: set[str]) -> None:
    assert set(found(".")) - set(found(".", exclude=(glob,))) == gone


def test_globs_are_relative_to_the_root(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "pkg")
    below = find_files([Path()], exclude=["pkg/deep"], root=tree).files
    assert below == [Path("inner.py")]


@pytest.mark.usefixtures("tree")
def test_no_file_comes_twice() -> None:
    assert found("a.py", "./a.py", "pkg/../a.py", "pkg", "pkg/inner.py") == [
        "a.py",
        "pkg/deep/er.py",
        "pkg/inner.py",
    ]


def test_links_are_followed_and_loops_survived(tree: Path) -> None:
    (tree / "pkg" / "again").symlink_to(tree / "pkg")
    (tree / "pkg" / "all").symlink_to(tree)
    (tree / "aaa.py").symlink_to(tree / "notes.txt")
    (tree / "gone.py").symlink_to(tree / "nowhere.py")
    elsewhere = tree / ".hidden" / "other"
    elsewhere.mkdir()
    (elsewhere / "o.py").touch()
    (tree / "linked").symlink_to(elsewhere)
    assert found("pkg", "aaa.py") == [
        *("aaa.py", "pkg/all/Dockerfile", "pkg/all/a.py", "pkg/all/b.py", "pkg/all/env/kept.py"),
        *("pkg/all/images/gpu.Dockerfile", "pkg/all/job.sbatch", "pkg/all/k8s.yaml"),
        *("pkg/all/linked/o.py", "pkg/all/n.ipynb", "pkg/all/pkg.py/odd.py", "pkg/all/run.sh"),
        *(
            "pkg/all/vendor/v.py",
            "pkg/all/x.bash",
            "pkg/all/y.slurm",
            "pkg/deep/er.py",
            "pkg/inner.py",
        ),
    ]


def test_a_link_to_itself_is_passed_over(tree: Path) -> None:
    (tree / "pkg" / "self.py").symlink_to(tree / "pkg" / "self.py")
    assert found("pkg") == ["pkg/deep/er.py", "pkg/inner.py"]
    assert found("pkg/self.py") == ["pkg/self.py"], "given by name, it is told when it is read"


def test_a_pipe_in_a_folder_is_not_waited_for(tree: Path) -> None:
    os.mkfifo(tree / "pkg" / "pipe.py")
    assert found("pkg") == ["pkg/deep/er.py", "pkg/inner.py"]


@pytest.mark.usefixtures("tree")
def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"^there is no x\.py, no pkg/y\n  try: give files or folders"
    ):
        found("a.py", "x.py", "pkg/y")


@pytest.mark.usefixtures("tree")
def test_a_folder_that_cannot_be_listed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refusing(path: Path) -> object:
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    result = find_files([Path("pkg")])
    assert result.files == [Path("pkg/inner.py")]
    (said,) = result.problems
    assert (str(said.place), said.rule) == ("pkg/deep:1:1", "DL000")
    assert said.message == "the folder cannot be listed: Permission denied"
