"""The Dockerfile: hadolint finds nothing, and its steps make an image in which a pod trains, as the
manifest has it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.config import FlagValues
from drumline.launch.kubernetes import KubernetesJob, manifest_text
from drumline.launch.node_plan import Program
from tests.multinode import needs
from tests.multinode.image import instructions

ROOT = Path(__file__).parents[2]
SEARCH_PATH = f"{Path(sys.executable).parent}:{needs.SEARCH_PATH}"


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=SEARCH_PATH)
    if hadolint is None:
        pytest.skip("pip install 'drumline[dev]' brings hadolint")
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_target_is_pinned_and_without_root() -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    for keyword, rest in instructions((ROOT / "Dockerfile").read_text()):
        if keyword == "FROM":
            parent, _, name = rest.split()
            assert parent in stages or re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", parent)
            stages[name] = []
        else:
            stages[name].append((keyword, rest))
    for target in ("cpu", "cuda"):
        assert stages[target][-2:] == [("USER", "1000:1000"), ("CMD", '["drumline", "--help"]')]
        installed = [rest for keyword, rest in stages[target] if keyword == "RUN"]
        assert all("--constraint" in rest for rest in installed)


@pytest.mark.soak
@pytest.mark.skipif(needs.missing() is not None, reason=str(needs.missing()))
@pytest.mark.timeout(900)
def test_a_pod_in_the_image_is_ready_saves_on_sigterm_and_resumes(tmp_path: Path) -> None:
    """As process 1 of its container, a user without rights, on a read-only root."""
    run = "/runs/digits"
    words = ("train", "digits", "--run", run, "--train.epochs", "5000")
    program = Program(words, is_task=True, run=run)
    manifest = tmp_path / "job.yaml"
    job = KubernetesJob(
        name="digits", flags=FlagValues({"image": "i"}), program=program, num_procs=2
    )
    manifest.write_text(manifest_text(job, "job"))
    image = tmp_path / "image"
    image.mkdir()
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    python = [sys.executable, "-m", "tests.multinode.image", str(image), str(manifest)]
    done = subprocess.run([*unshare, *python], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0
    starts = json.loads(done.stdout)
    assert [(start["ready"], start["code"]) for start in starts] == [(0, 75), (0, 75)], starts
    first, second = (start["text"] for start in starts)
    assert "preempted by SIGTERM" in first
    assert "resumed at step" in second, second
