import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Rating(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(300, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def tensors(path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(d["emb"], d["stars"])


@torch.no_grad()
def mae(net, loader, device):
    net.eval()
    err = n = 0.0
    for x, y in loader:
        err += (net(x.to(device)) - y.to(device)).abs().sum().item()
        n += y.numel()
    net.train()
    return err / n


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(10 + rank)
    train = tensors("train.pt")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 512, sampler=sampler, drop_last=True)
    dev_loader = DataLoader(tensors("dev.pt"), 1024)
    model = DDP(Rating().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    best = float("inf")
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        score = torch.zeros((), device=device)
        if rank == 0:
            score.fill_(mae(model.module, dev_loader, device))
        dist.broadcast(score, src=0)
        if score.item() < best:
            best = score.item()
            if rank == 0:
                torch.save(model.module.state_dict(), "rating.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
