"""`--dist.sync` and `--data.balance auto` on NCCL ranks that share one GPU: rounds of replicas
resume bit for bit, and a rank at half speed gets fewer samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.gpu.test_nccl_ranks import OWN_HOSTS, ROOT, losses, pid_of, run, running, train
from tests.gpu.test_sharded_modes_cuda import TASKS
from tests.jobs import assert_same_bits, newest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]
STEPS = ("--train.steps", "200", "--checkpoint.every_steps", "40")
STREAMED = ("--dist.sync_parts", "2", "--dist.sync_overlap", "2", "--dist.outer_dtype", "int8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOSTS)
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "planted.py").write_text((ROOT / "tests" / "planted_jobs.py").read_text())
    return tmp_path


@pytest.mark.parametrize("sync", [("diloco:8", *STREAMED), ("local:8",)], ids=["diloco", "local"])
def test_a_killed_run_resumes_its_rounds_with_the_same_bits(
    folder: Path, sync: tuple[str, ...]
) -> None:
    words = ("--dist.sync", *sync, *STEPS)
    whole = train(folder, "Words", "whole", *words)
    assert whole.process.returncode == 0, whole.output
    assert losses(folder, "whole")[-1] < 0.5 * losses(folder, "whole")[0]
    command = ("train", "tasks.py:Words", "--procs", "2", "--run", "killed", *words)
    with running(folder, *command, "--max-restarts", "0") as killed:
        killed.wait_for(r"saved step 80 ")
        os.kill(pid_of(folder, "killed", 1), signal.SIGKILL)
        assert killed.finish() != 0, killed.output
    again = run(folder, *command)
    assert again.process.returncode == 0, again.output
    assert_same_bits(newest(folder / "whole"), newest(folder / "killed"))


def test_a_rank_at_half_speed_gets_fewer_samples(folder: Path) -> None:
    work = (
        "--task.width",
        "2048",
        "--task.passes",
        "100",
        "--train.batch_size",
        "512",
        "--train.steps",
        "60",
    )
    saves = ("--checkpoint.every_steps", "60", "--data.balance", "auto")
    command = run(
        folder, "train", "planted.py:HalfSpeed", "--procs", "2", "--run", "halved", *work, *saves
    )
    assert command.process.returncode == 0, command.output
    fast, slow = newest(folder / "halved").documents["progress"]["facts"]["balance"]["sizes"]
    assert fast + slow == 512
    # Not 2 to 1: on a GPU that both share, each is faster when the other has less to do.
    assert fast > 1.2 * slow, command.output
