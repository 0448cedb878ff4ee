import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


class AutoEncoder(nn.Module):
    def __init__(self, latent=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 512), nn.ReLU(), nn.Linear(512, 784))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data-dir", default="data")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=256)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(2024 + rank)

    ds = datasets.MNIST(args.data_dir, train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=args.batch_size, sampler=sampler, num_workers=2, drop_last=True)

    model = DDP(AutoEncoder().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2, device=device)
        for x, _ in loader:
            x = x.to(device)
            loss = F.mse_loss(model(x), x.flatten(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.stack([loss.detach() * x.size(0), torch.tensor(float(x.size(0)), device=device)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch + 1:3d} mse {(stats[0] / stats[1]).item():.6f}")
    if rank == 0:
        os.makedirs("weights", exist_ok=True)
        torch.save(model.module.state_dict(), "weights/ae.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
