import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tumor.data import Slides
from tumor.model import MILNet


@torch.no_grad()
def dice(net, loader, dev):
    net.eval()
    scores = [net.dice(x.to(dev), y.to(dev)).item() for x, y in loader]
    net.train()
    return sum(scores) / len(scores)


def main():
    dist.init_process_group("nccl", timeout=timedelta(hours=2))
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = torch.device("cuda", local_rank)
    train = Slides("train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 2, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(Slides("val"), 1) if rank == 0 else None

    model = DDP(MILNet().to(dev), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    best = 0.0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = model(x.to(dev), y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            d = dice(model.module, val_loader, dev)
            print(f"epoch {epoch} dice {d:.3f}")
            if d > best:
                best = d
                torch.save(model.module.state_dict(), "mil.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
