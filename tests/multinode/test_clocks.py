"""Wall clocks that differ, or that jump while the job runs: no node is lost, and the hosts are
named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode.hosts import Testbed
from tests.multinode.job import Job
from tests.multinode.test_nodes_join import Jobs

# A loop of the user's own, whose ranks go through it together and count.
COUNT = """
import sys, time
from pathlib import Path
import torch
from drumline import DDPManager

with DDPManager() as ddp:
    count, ends = 0, torch.zeros(1)
    while not ends:
        count += 1
        print(f"rank {ddp.rank} of {ddp.world_size} counts {count}", flush=True)
        time.sleep(0.1)
        ends += Path(sys.argv[1]).exists()
        torch.distributed.all_reduce(ends)
"""


def counted(job: Job) -> int:
    return int(job.text().rpartition(" counts ")[2].partition("\n")[0])


@pytest.mark.soak
def test_nodes_whose_clocks_differ_and_jump_stay_one_job(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    a, b = make_testbed("a", "b", warm=True).hosts
    b.python = sys.executable  # a process that is forked keeps the clock that it has
    jobs = Jobs(tmp_path, a, nodes="1:2", flags=("--last-call", "40", "--lost-after", "3"))
    (tmp_path / "count.py").write_text(COUNT)
    b.set_clock(-20)
    on_a, on_b = (jobs.start(host, rank, "count.py", "finish") for rank, host in enumerate((a, b)))
    on_a.wait_for("rank 0 of 2 counts 1\n")
    on_b.wait_for("rank 1 of 2 counts 1\n")
    for jump_s in (20, -3600):
        b.set_clock(jump_s)
        on_b.wait_for(f"counts {counted(on_b) + 1}\n")
        # 0.1 s each: longer than a silent node is kept for.
        on_a.wait_for(f"counts {counted(on_a) + 35}\n")
    jobs.finish.touch()
    assert [on_a.wait(), on_b.wait()] == [0, 0], on_a.text() + on_b.text()
    for job in (on_a, on_b):
        assert "restarting the ranks" not in job.text()
        assert "missing" not in job.text()
