"""Run by test_store_crashes.py in a process of its own: forks writers, kills them, looks at what
they left.

    python crashes.py FOLDER    killed at each call that touches the disk, one after the other; then from outside,
                                after random delays

Ends with a traceback when a checkpoint was lost.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint import retention, store
from drumline.runs import catalog

TOUCHES_THE_DISK = {
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
    "open",
    "write",
    "flush",
    "fsync",
    "close",
    "scandir",
}


def write(root: Path, step: int, *, size: int = 64) -> None:
    tensors = {"model": {"w": torch.full((size,), float(step))}}
    store.write(
        root,
        step,
        tensors=tensors,
        documents={"progress": {"step": step}},
        metrics={"loss": float(step)},
    )


def prune(root: Path, *, last: int = 2, best: int = 1) -> None:
    if (newest := catalog.newest_valid(root).path) is not None:
        retention.prune(
            root, retention.Retention(last, best, "loss", higher_is_better=False), newest=newest
        )


def prune_to_one(root: Path) -> None:
    prune(root, last=1, best=0)


def work_until_killed(work: Callable[[Path], object], root: Path, moment: int) -> None:
    """Die by SIGKILL just before a call that touches the disk, which is just after the one
    before."""
    num_calls = 0

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal num_calls
        if event == "c_call" and function.__name__ in TOUCHES_THE_DISK:
            if num_calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            num_calls += 1

    sys.setprofile(profile)
    work(root)


def run_child(work: Callable[[], None]) -> int:
    """Fork, work, and give the pid; the child ends without a word to its parent's files."""
    if pid := os.fork():
        return pid
    signal.alarm(60)  # whatever happens to the parent, no writer lives on
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.setprofile(None)
        os._exit(code)


def newest_step(root: Path) -> int:
    path = catalog.newest_valid(root).path
    return 0 if path is None else catalog.verify(path).step


def check_resumes(root: Path, step: int) -> None:
    write(root, step)
    prune(root)
    assert newest_step(root) == step
    assert not [path for path in root.iterdir() if path.name.startswith(".")], list(root.iterdir())
    for left in catalog.list_steps(root):
        catalog.verify(root / catalog.folder_name(left))


def killed_at_every_moment(folder: Path, work: Callable[[Path], object], *, least: int) -> int:
    """Kill `work` at its first moment, its second, and so on until it comes to its end; how many
    there were."""
    start = folder / "start"
    for step in (1, 2, 3):
        write(start, step)
    moment = 0
    while True:
        root = folder / f"moment-{moment}"
        shutil.copytree(start, root)
        _, status = os.waitpid(run_child(partial(work_until_killed, work, root, moment)), 0)
        assert newest_step(root) >= least, (moment, list(root.iterdir()))
        check_resumes(root, 9)
        shutil.rmtree(root)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            shutil.rmtree(start)
            return moment
        moment += 1


def every_moment(folder: Path) -> None:
    counts = {
        "new": killed_at_every_moment(folder, lambda root: write(root, 4), least=3),
        "replaced": killed_at_every_moment(folder, lambda root: write(root, 3), least=3),
        "pruned": killed_at_every_moment(folder, prune_to_one, least=3),
    }
    assert counts["new"] >= 15, counts
    assert counts["replaced"] > counts["new"], counts
    assert counts["pruned"] >= 10, counts
    print(counts)


def write_on(root: Path, first: int, pipe: int) -> None:
    """Write one step after the other, each twice, and tell each when it is saved."""
    step = first
    while True:
        write(root, step, size=50_000)
        os.write(pipe, step.to_bytes(4, "little"))
        write(root, step, size=50_001)
        prune(root)
        step += 1


def any_moment(folder: Path) -> None:
    chance = random.Random(5)
    root = folder / "root"
    saved = 0
    for turn in range(15):
        reading, writing = os.pipe()
        pid = run_child(partial(write_on, root, saved + 1, writing))
        os.close(writing)
        # Some are killed in their first save, the others some time after it.
        reply = b"" if turn % 3 == 0 else os.read(reading, 4)
        time.sleep(chance.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while piece := os.read(reading, 4096):
            reply += piece
        os.close(reading)
        saved = int.from_bytes(reply[-4:], "little") if reply else saved
        assert newest_step(root) >= saved, (list(root.iterdir()), saved)
        saved = newest_step(root)
    assert saved >= 10, saved
    check_resumes(root, saved + 1)
    print(f"{saved} checkpoints")


if __name__ == "__main__":
    # forking with torch's idle threads: the child uses none
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(1)
    every_moment(Path(sys.argv[1]))
    any_moment(Path(sys.argv[1]))
