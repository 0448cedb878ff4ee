import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Projector(nn.Module):
    def __init__(self, d=512, out=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 512), nn.ReLU(), nn.Linear(512, out))

    def forward(self, a, b):
        return F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1)


def info_nce(a, b, temperature=0.1):
    a = torch.cat(all_gather(a))
    b = torch.cat(all_gather(b))
    logits = a @ b.t() / temperature
    target = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(28 + rank)
    d = torch.load("views.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["first"], d["second"])
    sampler = DistributedSampler(ds, seed=28, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    model = DDP(Projector().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = info_nce(*model(a.to(device), b.to(device)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "projector.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
