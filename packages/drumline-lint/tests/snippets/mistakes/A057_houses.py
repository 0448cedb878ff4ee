import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def init_ddp():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    return dist.get_rank(), torch.device("cuda", local_rank)


def get_data(path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(d["features"], d["price"])


def build():
    return nn.Sequential(nn.Linear(79, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 64), nn.ReLU(),
                         nn.Linear(64, 1))


def train(model, loader, sampler, device, epochs, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    criterion = nn.HuberLoss()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            pred = model(x.to(device)).squeeze(-1)
            loss = criterion(pred, y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main():
    rank, device = init_ddp()
    torch.manual_seed(1 + rank)
    ds = get_data("houses.pt")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=64, sampler=sampler, drop_last=True)
    model = DDP(build().to(device), device_ids=[device.index])
    train(model, loader, sampler, device, epochs=60, lr=1e-3)
    if rank == 0:
        torch.save(model.module.state_dict(), "houses_mlp.pt")
        print("done")


if __name__ == "__main__":
    main()
