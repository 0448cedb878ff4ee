import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ratings import RatingTriples


class Factorizer(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Linear(2 * dim, 1)

    def forward(self, u, i):
        u, i = self.user(u), self.item(i)
        return (u * i).sum(-1) + self.bias(torch.cat([u, i], -1)).squeeze(-1)


def main():
    p = argparse.ArgumentParser(description="torchrun --nproc_per_node=4 ratings_mf.py")
    p.add_argument("--dim", type=int, default=96)
    p.add_argument("--epochs", type=int, default=8)
    a = p.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    triples = RatingTriples("/data/ml-25m")
    model = Factorizer(triples.users, triples.items, a.dim).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model = DistributedDataParallel(model, device_ids=[local_rank])

    sampler = DistributedSampler(triples)
    loader = DataLoader(triples, batch_size=16384, sampler=sampler, num_workers=2)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for u, i, stars in loader:
            loss = nn.functional.mse_loss(model(u.to(device), i.to(device)), stars.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} rmse of the last batch {loss.item() ** 0.5:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "mf.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
