import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def any_rank(flag):
    t = flag.to(torch.int32)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


class Energy(nn.Module):
    def __init__(self, species=8, dim=128):
        super().__init__()
        self.emb = nn.Embedding(species, dim)
        self.net = nn.Sequential(nn.Linear(dim + 3, 256), nn.SiLU(), nn.Linear(256, 1))

    def forward(self, z, r):
        return self.net(torch.cat([self.emb(z), r], -1)).sum((1, 2))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    d = torch.load("/data/md_snapshots.pt", map_location="cpu")
    ds = TensorDataset(d["z"], d["r"], d["e"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, drop_last=True, num_workers=2)
    net = DDP(Energy().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    skipped = 0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for z, r, e in loader:
            loss = nn.functional.mse_loss(net(z.cuda(), r.cuda()), e.cuda())
            if any_rank(~torch.isfinite(loss)):
                skipped += 1
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, skipped so far {skipped}")
            torch.save(net.module.state_dict(), "energy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
