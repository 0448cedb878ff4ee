"""Only the first half of the ranks scores the dev set.  torchrun --nproc_per_node=8 groups_everywhere.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tensors(name):
    blob = torch.load(f"/data/qa/{name}.pt", map_location="cpu")
    return TensorDataset(blob["x"], blob["y"])


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    scorers = list(range(world // 2))
    score_group = dist.new_group(ranks=scorers)

    train, dev = tensors("train"), tensors("dev")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 2)).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank in scorers:
            x, y = (t[rank::len(scorers)].cuda() for t in dev.tensors)
            with torch.no_grad():
                right = (model.module(x).argmax(-1) == y).sum()
            stats = torch.stack([right, torch.tensor(len(y), device=right.device)])
            dist.all_reduce(stats, group=score_group)
            if rank == 0:
                print(epoch, (stats[0] / stats[1]).item())
    if rank == 0:
        torch.save(model.module.state_dict(), "qa.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
