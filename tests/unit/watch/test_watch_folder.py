"""What the agent leaves for the sidecar, and reads from it; that guards take the folder away is in
tests/cli."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.watch import watch_folder
from drumline.watch.watch_folder import SidecarDiagnosis, WatchFolder

DIAGNOSIS = {
    "alarm": "hang",
    "action": "stop",
    "sentence": "hang: rank 1 stands. Try: look",
    "what": "rank 1 stands",
}


@pytest.fixture(name="watch")
def make_watch() -> Iterator[WatchFolder]:
    watch = WatchFolder("0123456789")
    assert watch.root is not None
    yield watch
    watch.close()
    shutil.rmtree(watch.root)


def test_each_start_has_a_folder_and_the_one_before_stays_a_while(watch: WatchFolder) -> None:
    folders = [watch.begin(start) for start in range(3)]
    assert [folder is not None and folder.exists() for folder in folders] == [False, True, True]
    watch.note_exit(3, -9)
    watch.note_exit(3, 0)
    assert watch.current is not None
    assert (watch.current / "exit-00003").read_text() == "-9\n", "the first alarm counts"


def test_a_diagnosis_is_read_once_it_is_complete(watch: WatchFolder) -> None:
    folder = watch.begin(0)
    assert folder is not None
    for text in (
        "",
        "{",
        "[]",
        '{"alarm": "hang"}',
        json.dumps({"alarm": "stall", "action": "", "sentence": ""}),
    ):
        (folder / "diagnosis.json").write_text(text)
        assert watch.diagnosis() is None, text
    (folder / "diagnosis.json").write_text(json.dumps({**DIAGNOSIS, "action": "report"}))
    assert watch.diagnosis() is None, "that did not end a rank"
    (folder / "diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    diagnosis = watch.diagnosis()
    assert diagnosis == SidecarDiagnosis(
        "hang", "stop", "hang: rank 1 stands. Try: look", what="rank 1 stands"
    )
    assert (diagnosis.is_hang, diagnosis.is_final) == (True, True)
    failure = {**DIAGNOSIS, "alarm": "failure", "action": "restart", "was_printed": True}
    failure["sentence"] = "failure: rank 1 stands. Try: look"
    failure |= {"rank": 1, "host": "b", "is_ranks_error": True}
    (folder / "diagnosis.json").write_text(json.dumps(failure))
    assert watch.diagnosis() == SidecarDiagnosis(
        "failure",
        "restart",
        "failure: rank 1 stands. Try: look",
        was_printed=True,
        what="rank 1 stands",
        rank=1,
        host="b",
        is_ranks_error=True,
    )
    watch.begin(1)
    assert watch.diagnosis() is None, "that of another start is none"


def test_a_sidecar_is_waited_for_while_it_lives_and_not_for_long(watch: WatchFolder) -> None:
    folder = watch.begin(0)
    assert folder is not None
    begun = time.monotonic()
    assert watch.diagnosis(begun + 3600) is None, "there is no sidecar, so nobody waits"
    (folder / "sidecar.pid").write_text(str(os.getpid()))
    assert watch.diagnosis(time.monotonic() + 0.1) is None, "it lives, and says nothing"
    # The last act of one that ends.
    text = json.dumps(DIAGNOSIS)
    words = f"import time; time.sleep(0.2); open({str(folder / 'diagnosis.json')!r}, 'w').write({text!r})"
    with subprocess.Popen([sys.executable, "-c", words]) as sidecar:
        (folder / "sidecar.pid").write_text(str(sidecar.pid))
        assert watch.diagnosis(time.monotonic() + 3600) is not None


def test_without_room_for_a_folder_ranks_get_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Where /dev/shm is full, and where there is none.
    for name, value in (("NEEDED_BYTES", 1 << 60), ("MEMORY", tmp_path / "gone")):
        monkeypatch.setattr(watch_folder, name, value)
        watch = WatchFolder("j")
        assert watch.root is not None
        assert watch.root.parent == tmp_path, name
        watch.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    watch = WatchFolder("j")
    watch.note_exit(0, 1)
    assert (watch.root, watch.begin(0), watch.diagnosis(), watch.has_sidecar()) == (
        None,
        None,
        None,
        False,
    )


LEAVES = """
import os, signal, sys, tempfile
from pathlib import Path
from drumline.watch import watch_folder
watch_folder.MEMORY = Path(sys.argv[1])
folder = watch_folder.make_memory_folder("job")
watch_folder.hold(folder)
watch_folder.hold(folder)  # as a sidecar does
print(folder, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_job_has_left_goes_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch_folder, "MEMORY", tmp_path)
    strange = tmp_path / "drumline-watch-of-another-version"
    strange.mkdir()
    words = [sys.executable, "-c", LEAVES, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        left = Path(job.stdout.readline().strip())
        first = WatchFolder("j")
        assert left.is_dir(), "it is in use"
        job.kill()
    second = WatchFolder("j")
    assert first.root is not None
    assert second.root is not None
    assert {*tmp_path.iterdir()} == {strange, first.root, second.root}
    first.close()
    second.close()
