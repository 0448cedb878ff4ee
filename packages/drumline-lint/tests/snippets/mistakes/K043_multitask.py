import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TASKS = {"age": 8, "gender": 2, "emotion": 7}


class MultiHead(nn.Module):
    def __init__(self, dim=768):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(256, n) for t, n in TASKS.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def task_loader(task):
    d = torch.load(f"/data/faces/{task}.pt", map_location="cpu")
    ds = TensorDataset(d["emb"], d["y"])
    sampler = DistributedSampler(ds, drop_last=True)
    return sampler, DataLoader(ds, 256, sampler=sampler, drop_last=True, num_workers=2)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    loaders = {t: task_loader(t) for t in TASKS}
    model = DDP(MultiHead().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        plan = []
        for t, (sampler, dl) in loaders.items():
            sampler.set_epoch(epoch)
            plan += [t] * len(dl)
        random.Random(epoch).shuffle(plan)
        its = {t: iter(dl) for t, (_, dl) in loaders.items()}
        for t in plan:
            x, y = next(its[t])
            loss = nn.functional.cross_entropy(model(x.cuda(), t), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "multihead.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
