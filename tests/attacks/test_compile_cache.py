"""Another user of the machine prepares the folder from which torch's compiler loads code: none of
theirs is loaded."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from drumline.base.errors import UsageError
from drumline.base.startup import INDUCTOR_CACHE, TRITON_CACHE, use_private_cache
from drumline.launch.node.local import run_node
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.training.manager import RunManager
from drumline.training.tasks.built_in import load_task
from tests.attacks.test_run_folder_owner import by_user


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory, which every user may write to, and a home directory in another
    place."""
    folder = Path(tempfile.mkdtemp(prefix="drumline-shared-"))
    folder.chmod(0o1777)
    home = Path(tempfile.mkdtemp(prefix="drumline-home-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HOME", str(home))
    for variable in (INDUCTOR_CACHE, TRITON_CACHE):
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    yield folder
    shutil.rmtree(folder)
    shutil.rmtree(home)


def private_name() -> str:
    return f"drumline-compile-{os.geteuid()}"


def test_torchs_own_folder_belongs_to_whoever_makes_it_first(
    other_user: int, temporary: Path
) -> None:
    """What is defended against."""
    by_user(other_user, 'mkdir "$1"', default_cache_dir())
    assert Path(cache_dir()).stat().st_uid == other_user


def test_a_rank_under_any_launcher_has_a_private_one(other_user: int, temporary: Path) -> None:
    by_user(other_user, 'mkdir "$1"', default_cache_dir())
    with RunManager():
        folder = Path(cache_dir())
    assert folder == temporary / private_name()
    entry = folder.lstat()
    assert (stat.S_IMODE(entry.st_mode), entry.st_uid) == (0o700, os.geteuid())
    assert os.environ[TRITON_CACHE] == str(folder / "triton")


TASK = """
import os
from drumline.training.tasks import ImageClassification

class Compiled(ImageClassification):
    cache_at_import = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
"""


def test_it_is_there_before_the_imports_of_a_task(temporary: Path) -> None:
    """They may load torch's compiler, which chooses its cache then."""
    (temporary / "compiled.py").write_text(TASK)
    task: Any = load_task(f"{temporary / 'compiled.py'}:Compiled")
    assert task.cache_at_import == str(temporary / private_name())


def test_the_next_run_finds_what_this_one_compiled(temporary: Path) -> None:
    folders = []
    for _ in range(2):
        environment: dict[str, str] = {}
        use_private_cache(environment)
        folders.append(environment[INDUCTOR_CACHE])
        Path(folders[0], "compiled").touch()
    assert folders[0] == folders[1]
    assert Path(folders[1], "compiled").exists()


PREPARED = {
    "a folder": 'mkdir -m 777 "$1"',
    "a link to one of theirs": 'mkdir -m 777 "$1.theirs"; ln -s "$1.theirs" "$1"',
    "a link to one of ours": 'ln -s "$2" "$1"',
    "a file": 'touch "$1"',
}


@pytest.mark.parametrize("commands", PREPARED.values(), ids=PREPARED.keys())
def test_a_private_name_that_another_user_took_is_not_used(
    other_user: int, temporary: Path, commands: str
) -> None:
    by_user(other_user, commands, temporary / private_name(), Path.home())
    environment: dict[str, str] = {}
    with pytest.raises(UsageError, match=f"set {INDUCTOR_CACHE} to a new folder that only you"):
        use_private_cache(environment)
    assert environment == {}


def test_a_private_folder_that_others_may_write_to_is_not_used(temporary: Path) -> None:
    (temporary / private_name()).mkdir()
    (temporary / private_name()).chmod(0o777)
    with pytest.raises(UsageError, match=r"others can write to it \(mode 777\)"):
        use_private_cache({})


@pytest.mark.parametrize("variable", [INDUCTOR_CACHE, TRITON_CACHE])
def test_a_folder_of_another_user_is_refused_before_a_rank_starts(
    other_user: int, temporary: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folder = temporary / "cache"
    by_user(other_user, 'mkdir "$1"', folder)
    monkeypatch.setenv(variable, str(folder))
    starts = (
        RunManager().setup,
        lambda: run_node(NodePlan(num_procs=1), Program(("script.py",)), Supervision()),
    )
    for start in starts:
        with pytest.raises(UsageError) as caught:
            start()
        assert str(caught.value) == (
            f"torch runs code from its compile cache {folder}, which is not safe: "
            f"it belongs to user id {other_user}, and this is user id 0\n"
            f"  try: set {variable} to a new folder that only you can write to"
        )


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707, 0o770])
def test_a_folder_that_others_may_write_to_is_refused(
    other_user: int, temporary: Path, mode: int
) -> None:
    folder = temporary / "cache"
    folder.mkdir()
    os.chown(folder, -1, other_user)
    folder.chmod(mode)
    with pytest.raises(
        UsageError,
        match=rf"which is not safe: others can write to it \(mode {mode:o}\)\n  try: set",
    ):
        use_private_cache({INDUCTOR_CACHE: str(folder)})


def test_the_users_own_folder_is_used_and_made(temporary: Path) -> None:
    folder = temporary / "cache"
    environment = {INDUCTOR_CACHE: str(folder)}
    use_private_cache(environment)
    assert environment == {INDUCTOR_CACHE: str(folder), TRITON_CACHE: str(folder / "triton")}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (temporary / "link").symlink_to(folder)
    use_private_cache({INDUCTOR_CACHE: str(temporary / "link"), TRITON_CACHE: str(folder)})


def test_a_folder_that_cannot_be_made_ends_no_run(temporary: Path) -> None:
    """Most runs compile nothing."""
    use_private_cache({INDUCTOR_CACHE: "/proc/no-such-folder"})


def test_a_private_folder_that_cannot_be_made_is_not_left_to_others(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    """Whoever fills the disk could make it later."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(UsageError, match=f"set {INDUCTOR_CACHE} to a new folder that only you"):
        use_private_cache({})
