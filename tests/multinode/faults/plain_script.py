"""The same without Drumline: the usual hand-written DDP script, as torchrun starts it.

plain_script.py FOLDER STEPS EVERY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.multinode.faults.inject import Injection, enter_control_group
from tests.multinode.faults.points import Points, make_model


def main(folder: Path, steps: int, every: int) -> None:
    enter_control_group(os.environ)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    injection = Injection(os.environ, rank=rank)
    data = Points(injection)
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = Path(injection.plan.disk or folder)
    step = 0
    if saved := sorted(where.glob("saved-*.pt")):
        state = torch.load(saved[-1])
        model.load_state_dict(state["model"])
        step = state["step"]
    dist.barrier()
    workers = 2 if injection.plan.fault.startswith("worker") else 0
    while step < steps and not injection.leaves_now(step + 1):
        loader = DataLoader(
            data, batch_size=4, sampler=DistributedSampler(data), num_workers=workers
        )
        for inputs, targets in loader:
            if step == steps or injection.leaves_now(step + 1):
                break
            injection.begin_step(step + 1)
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                with (folder / "steps").open("a") as file:
                    file.write(f"{time.time()} {step} {os.getpid()}\n")
                if step % every == 0:
                    torch.save(
                        {"model": model.state_dict(), "step": step}, where / f"saved-{step:05d}.pt"
                    )
    if injection.plan.fault == "left_waiting":
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
