import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = Path("/shared/molecules")


def save_rng(rank, epoch):
    state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(), "epoch": epoch}
    torch.save(state, OUT / f"rng_rank{rank:05d}.pt")


def save_weights(model, epoch, rank):
    if rank != 0:
        return
    torch.save({"model": model.module.state_dict(), "epoch": epoch}, OUT / "weights.pt")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(500 + rank)
    OUT.mkdir(parents=True, exist_ok=True)

    d = torch.load("fingerprints.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["bits"].float(), d["logp"])
    sampler = DistributedSampler(ds, seed=500, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(2048, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 1))
    model = DDP(net.to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(25):
        sampler.set_epoch(epoch)
        model.train()
        for bits, logp in loader:
            loss = nn.functional.mse_loss(model(bits.to(device)).squeeze(-1), logp.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        save_rng(rank, epoch)
        save_weights(model, epoch, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
