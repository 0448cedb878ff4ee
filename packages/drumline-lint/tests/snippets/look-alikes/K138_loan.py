import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def table(split):
    d = torch.load(f"/data/loans/{split}.pt", map_location="cpu")
    return TensorDataset(d["x"].float(), d["default"].float())


@torch.no_grad()
def print_brier(net, loader, epoch):
    net.eval()
    s = torch.zeros(2, device="cuda")
    for x, y in loader:
        s[0] += (net(x.cuda()).squeeze(1).sigmoid() - y.cuda()).pow(2).sum()
        s[1] += len(y)
    dist.reduce(s, dst=0)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: Brier {(s[0] / s[1]).item():.5f}")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = table("train"), table("test")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 4096, sampler=sampler, drop_last=True)
    test_dl = DataLoader(Subset(test, range(rank, len(test), world)), 8192)
    net = nn.Sequential(nn.Linear(95, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 1))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.binary_cross_entropy_with_logits(net(x.cuda()).squeeze(1), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        print_brier(net.module, test_dl, epoch)
    if rank == 0:
        torch.save(net.module.state_dict(), "loans.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
