import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

from leaf.data import Leaves
from leaf.model import mobilenet

SEED = 2024


def split(ds, frac=0.15):
    n = int(len(ds) * frac)
    g = torch.Generator().manual_seed(SEED)
    return random_split(ds, [len(ds) - n, n], generator=g)


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    train, val = split(Leaves("/data/leaves"))
    ts = DistributedSampler(train)
    tl = DataLoader(train, 64, sampler=ts, num_workers=4, drop_last=True)
    vl = DataLoader(val, 64, sampler=DistributedSampler(val, shuffle=False), num_workers=2)
    model = DDP(mobilenet(12).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(30):
        ts.set_epoch(epoch)
        model.train()
        for x, y in tl:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        c = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in vl:
                c[0] += (model(x.cuda()).argmax(1) == y.cuda()).sum()
                c[1] += len(y)
        dist.all_reduce(c)
        if rank == 0:
            print(epoch, (c[0] / c[1]).item())
            torch.save(model.module.state_dict(), "leaf.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
