"""One backbone, several datasets: each batch belongs to one task."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from multitask.data import TaskSet
from multitask.trunk import ConvTrunk

TASKS = {"digits": 10, "letters": 26, "symbols": 90}
STEPS = 60_000


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = ConvTrunk(width=256)
        self.heads = nn.ModuleDict({t: nn.Linear(256, n) for t, n in TASKS.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class Feed:
    """Endless batches of one task, with a fresh order in each pass."""

    def __init__(self, task, batch):
        data = TaskSet(f"/data/{task}")
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch, sampler=self.sampler, num_workers=3, drop_last=True)
        self.epoch = 0
        self._restart()

    def _restart(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        self.it = iter(self.loader)

    def next(self):
        try:
            return next(self.it)
        except StopIteration:
            self._restart()
            return next(self.it)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    feeds = {t: Feed(t, 128) for t in TASKS}
    chooser = random.Random(42)  # the same sequence of tasks on every rank
    model = DDP(MultiTask().cuda(), device_ids=[local], gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    crit = nn.CrossEntropyLoss()

    for step in range(STEPS):
        task = chooser.choice(sorted(TASKS))
        x, y = feeds[task].next()
        loss = crit(model(x.cuda(non_blocking=True), task), y.cuda(non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if rank == 0 and step % 200 == 0:
            print(f"{step} {task} {loss.item():.3f}", flush=True)
        if rank == 0 and step % 5000 == 4999:
            torch.save(model.module.state_dict(), f"multitask-{step + 1}.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
