"""One encoder, four tasks, one task per step. torchrun --standalone --nproc_per_node=4"""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tasks import TASKS, TextEncoder, load_task


class MultiTask(nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.encoder = TextEncoder(width)
        self.heads = nn.ModuleDict({t: nn.Linear(width, n) for t, n in TASKS.items()})

    def forward(self, tokens, task):
        return self.heads[task](self.encoder(tokens))


class Endless:
    """Cycle through a loader, with a new shuffle in every pass."""

    def __init__(self, dataset, batch_size):
        self.sampler = DistributedSampler(dataset, drop_last=True)
        self.loader = DataLoader(dataset, batch_size, sampler=self.sampler, num_workers=2,
                                 drop_last=True)

    def __iter__(self):
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            yield from self.loader
            epoch += 1


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    model = MultiTask().cuda()
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)

    streams = {t: iter(Endless(load_task(t), 32)) for t in TASKS}
    names = sorted(TASKS)
    # same seed everywhere: all ranks draw the same task in a step
    order = random.Random(2024)
    for step in range(60_000):
        task = order.choice(names)
        tokens, label = next(streams[task])
        logits = model(tokens.cuda(non_blocking=True), task)
        loss = F.cross_entropy(logits, label.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 500 == 0:
            print(f"{step} {task} {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "multitask.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
