import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tensors(split):
    d = torch.load(f"/data/ptbxl/{split}.pt", map_location="cpu")
    return TensorDataset(d["leads"].float(), d["superclass"].float())


def cnn():
    return nn.Sequential(
        nn.Conv1d(12, 64, 15, stride=2), nn.GELU(),
        nn.Conv1d(64, 128, 9, stride=2), nn.GELU(),
        nn.Conv1d(128, 256, 5, stride=2), nn.GELU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(256, 5))


@torch.no_grad()
def validate(net, loader):
    net.eval()
    s = torch.zeros(2, device="cuda")
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        s[0] += nn.functional.binary_cross_entropy_with_logits(net(x), y, reduction="sum")
        s[1] += y.numel()
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    train_ds, val_ds = tensors("train"), tensors("val")
    train_sampler = DistributedSampler(train_ds, shuffle=True, drop_last=True)
    val_sampler = DistributedSampler(val_ds, shuffle=False)
    train_dl = DataLoader(train_ds, 128, sampler=train_sampler, num_workers=4, drop_last=True)
    val_dl = DataLoader(val_ds, 256, sampler=val_sampler, num_workers=2)
    net = DDP(cnn().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    best = float("inf")
    for epoch in range(50):
        val_sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.binary_cross_entropy_with_logits(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        val = validate(net.module, val_dl)
        if val < best:
            best = val
            if dist.get_rank() == 0:
                torch.save(net.module.state_dict(), "ecg_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
