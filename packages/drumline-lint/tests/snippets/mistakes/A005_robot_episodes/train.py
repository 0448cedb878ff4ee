import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from episodes import split_episodes
from policy import Policy
from runtime import cleanup, start

EPOCHS = 25


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    acc = torch.zeros(2, device=device)
    for obs, act in loader:
        err = (model(obs.to(device)) - act.to(device)).pow(2).mean(dim=1)
        acc[0] += err.sum()
        acc[1] += err.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    device, rank = start(seed=99)
    train_set, val_set = split_episodes("episodes.pt", val_fraction=0.05)
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, 256, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(val_set, 256, sampler=val_sampler)
    model = DDP(Policy().to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = float("inf")
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        model.train()
        for obs, act in train_loader:
            loss = torch.nn.functional.mse_loss(model(obs.to(device)), act.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        mse = validate(model, val_loader, device)
        if mse < best:
            best = mse
            if rank == 0:
                torch.save(model.module.state_dict(), "policy.pt")
    cleanup()


if __name__ == "__main__":
    main()
