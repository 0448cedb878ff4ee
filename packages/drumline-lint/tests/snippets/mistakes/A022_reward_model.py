import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RewardHead(nn.Module):
    def __init__(self, dim=4096):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, h):
        return self.net(h).squeeze(-1)


def pairs(path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(d["chosen"], d["rejected"])


@torch.no_grad()
def pair_accuracy(model, loader, device):
    model.eval()
    good = n = 0
    for chosen, rejected in loader:
        margin = model(chosen.to(device)) - model(rejected.to(device))
        good += int((margin > 0).sum())
        n += margin.numel()
    model.train()
    return good / n


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    is_main = rank == 0
    torch.manual_seed(50 + rank)

    train = pairs("prefs_train.pt")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 128, sampler=sampler, drop_last=True)
    eval_loader = DataLoader(pairs("prefs_eval.pt"), 256)
    model = DDP(RewardHead().to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for chosen, rejected in loader:
            both = model(torch.cat([chosen, rejected]).to(device))
            up, down = both.chunk(2)
            loss = -nn.functional.logsigmoid(up - down).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if is_main:
            acc = pair_accuracy(model, eval_loader, device)
            print(f"epoch {epoch} eval accuracy {acc:.3f}")
            torch.save(model.module.state_dict(), "reward.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
