import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def read(name):
    d = torch.load(f"letters_{name}.pt", map_location="cpu", weights_only=True)
    return TensorDataset(d["x"], d["y"])


@torch.no_grad()
def confusion(net, loader, classes, device):
    net.eval()
    table = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    for x, y in loader:
        pred = net(x.to(device)).argmax(1)
        flat = y.to(device) * classes + pred
        table += torch.bincount(flat, minlength=classes * classes).view(classes, classes)
    dist.reduce(table, dst=0)
    return table


def main(classes=26):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(36 + rank)
    train, test = read("train"), read("test")
    sampler = DistributedSampler(train, seed=36, drop_last=True)
    loader = DataLoader(train, 128, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 512)
    net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, classes)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    table = confusion(model.module, test_loader, classes, device)
    if rank == 0:
        accuracy = table.diagonal().sum() / table.sum()
        print(f"test accuracy {accuracy.item():.4f}")
        torch.save({"net": model.module.state_dict(), "confusion": table.cpu()}, "letters.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
