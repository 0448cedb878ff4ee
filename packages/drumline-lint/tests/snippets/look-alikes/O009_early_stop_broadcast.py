import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from churn.data import Customers
from churn.model import MLP


def evaluate(model, loader, dev):
    model.eval()
    t = torch.zeros(2, device=dev)
    with torch.no_grad():
        for x, y in loader:
            out = model(x.to(dev))
            t[0] += torch.nn.functional.binary_cross_entropy_with_logits(out, y.to(dev), reduction="sum")
            t[1] += len(y)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = torch.device("cuda", local_rank)
    tr, va = Customers("train"), Customers("val")
    ts = DistributedSampler(tr)
    tl = DataLoader(tr, 512, sampler=ts, drop_last=True)
    vl = DataLoader(va, 512, sampler=DistributedSampler(va, shuffle=False))
    model = DDP(MLP().to(dev), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    best, bad = float("inf"), 0
    stop = torch.zeros(1, dtype=torch.int32, device=dev)
    for epoch in range(500):
        ts.set_epoch(epoch)
        model.train()
        for x, y in tl:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x.to(dev)), y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
        val = evaluate(model, vl, dev)
        if rank == 0:
            if val < best:
                best, bad = val, 0
                torch.save(model.module.state_dict(), "mlp.pt")
            else:
                bad += 1
            stop.fill_(int(bad >= 10))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
