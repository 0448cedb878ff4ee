import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from fraud.data import Transactions
from fraud.model import TabTransformer


def val_loss(model, loader, crit, dev):
    model.eval()
    acc = torch.zeros(2, dtype=torch.float64, device=dev)
    with torch.no_grad():
        for cat, num, y in loader:
            out = model(cat.to(dev), num.to(dev)).squeeze(1)
            acc[0] += crit(out, y.to(dev)) * y.numel()
            acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main(patience=4):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(dev)

    train, val = Transactions("train"), Transactions("val")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 1024, sampler=sampler, num_workers=4, drop_last=True)
    val_dl = DataLoader(val, 4096, sampler=DistributedSampler(val, shuffle=False), num_workers=4)

    model = DDP(TabTransformer().to(dev), device_ids=[dev.index])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    crit = torch.nn.BCEWithLogitsLoss()
    best, bad = float("inf"), 0
    stop = torch.zeros(1, dtype=torch.int32, device=dev)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for cat, num, y in train_dl:
            opt.zero_grad(set_to_none=True)
            crit(model(cat.to(dev), num.to(dev)).squeeze(1), y.to(dev)).backward()
            opt.step()

        loss = val_loss(model, val_dl, crit, dev)
        if rank == 0:
            print(f"epoch {epoch} val {loss:.5f}")
            if loss < best:
                best, bad = loss, 0
                torch.save(model.module.state_dict(), "tab.pt")
            else:
                bad += 1
            stop.fill_(int(bad >= patience))
        dist.broadcast(stop, src=0)
        if stop.item():
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
