import os

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CFG = dict(lr=2e-3, batch=8192, epochs=30, width=512)


class Tower(nn.Module):
    def __init__(self, cats, numeric, width):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, 16) for c in cats)
        self.mlp = nn.Sequential(nn.Linear(16 * len(cats) + numeric, width), nn.ReLU(),
                                 nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, cat, num):
        e = [m(cat[:, i]) for i, m in enumerate(self.embs)]
        return self.mlp(torch.cat(e + [num], 1)).squeeze(1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    wandb.init(project="house-price", config=CFG)

    d = torch.load("/data/prices/train.pt", map_location="cpu")
    ds = TensorDataset(d["cat"], d["num"], d["log_price"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, CFG["batch"], sampler=sampler, num_workers=2, drop_last=True)
    net = DDP(Tower(d["cards"], d["num"].size(1), CFG["width"]).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=CFG["lr"])
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device="cuda")
        for cat, num, y in loader:
            loss = nn.functional.huber_loss(net(cat.cuda(), num.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        total /= len(loader)
        dist.all_reduce(total)
        wandb.log({"loss": total.item() / dist.get_world_size(), "epoch": epoch})
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "prices.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
