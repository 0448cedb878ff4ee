"""What the launcher kills itself is named as its own: nobody has to look for who sent the
signal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from drumline.watch.sidecar.sidecar_network import CLOSE_AFTER_S
from tests.multinode import processes
from tests.multinode.faults.reading import said_in
from tests.multinode.storm.bed import StormBed

ENDS_OF_B = (
    "hang: b is cut off from the other nodes",
    "failure: rank 1 on b was killed by drumline's launcher at step ",
)
"""Which of both is said depends on who acts first, the sidecar on b or its launcher."""


@pytest.mark.soak
def test_a_rank_that_its_launcher_kills_because_another_node_restarted(tmp_path: Path) -> None:
    bed = StormBed(tmp_path)
    run = tmp_path / "run"
    with bed.bed:
        job = bed.launch(run, steps=100_000, every=20, step_s=0.05)
        processes.wait_until(lambda: len(bed.steps(run)) >= 40, "steps", timeout_s=120)
        bed.bed["b"].cut()
        bed.kill_rank(bed.bed["a"])  # rank 1 does not learn of it
        job.wait_for("[a] drumline: restarting the ranks", timeout_s=60)
        # the sidecar on b does not get what that on a has sent
        time.sleep(CLOSE_AFTER_S + 2)
        bed.bed["b"].restore()
        job.wait_for("[b] drumline: restarting the ranks (node 0 (a) restarted)", timeout_s=60)
        processes.wait_until(
            lambda: any(sentence.startswith(ENDS_OF_B) for sentence in sentences(tmp_path)),
            "a sentence about the end on b",
            timeout_s=60,
        )
        new_step = len(bed.steps(run)) + 20
        processes.wait_until(lambda: len(bed.steps(run)) >= new_step, "steps", timeout_s=60)
    killed = [sentence for sentence in sentences(tmp_path) if "killed" in sentence]
    by_the_test = [sentence for sentence in killed if "find out who sent it" in sentence]
    assert by_the_test, killed
    assert all(
        sentence.startswith("failure: rank 0 on a was killed by SIGKILL")
        for sentence in by_the_test
    ), killed
    by_drumline = [sentence for sentence in killed if sentence not in by_the_test]
    assert all(", because node 0 (a) restarted. Try: " in text for text in by_drumline), killed


def sentences(folder: Path) -> list[str]:
    return [sentence.message for sentence in said_in(folder)]
