import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

from chestx.dataset import ChestXray
from chestx.model import densenet121


def loaders(root, bs):
    full = ChestXray(root)
    n_val = int(0.1 * len(full))
    train_ds, val_ds = random_split(full, [len(full) - n_val, n_val])
    train_sampler = DistributedSampler(train_ds, shuffle=True)
    val_sampler = DistributedSampler(val_ds, shuffle=False)
    train = DataLoader(train_ds, bs, sampler=train_sampler, num_workers=4, drop_last=True)
    val = DataLoader(val_ds, bs, sampler=val_sampler, num_workers=4)
    return train, val, train_sampler


@torch.no_grad()
def evaluate(model, loader, dev):
    model.eval()
    stat = torch.zeros(2, device=dev)
    for x, y in loader:
        x, y = x.to(dev), y.to(dev)
        stat[0] += ((model(x) > 0) == y.bool()).float().sum()
        stat[1] += y.numel()
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = torch.device("cuda", local_rank)
    train, val, train_sampler = loaders("/data/nih", 32)
    model = DDP(densenet121(14).to(dev), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    bce = torch.nn.BCEWithLogitsLoss()
    for epoch in range(25):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            opt.zero_grad()
            loss = bce(model(x.to(dev)), y.to(dev))
            loss.backward()
            opt.step()
        acc = evaluate(model, val, dev)
        if dist.get_rank() == 0:
            print(epoch, acc)
            torch.save(model.module.state_dict(), "densenet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
