"""Learns to take noise away from signals. Ranks come from Slurm, or from torchrun."""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    """Sums of sines; the noise is new each time."""

    def __init__(self, count=1200, length=64):
        draw = torch.Generator().manual_seed(14)
        time = torch.linspace(0, 6.2832, length)
        pitch = torch.randint(1, 6, (count, 2, 1), generator=draw)
        self.clean = torch.sin(time * pitch).sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, index):
        clean = self.clean[index]
        return clean + 0.5 * torch.randn_like(clean), clean


class Denoiser(nn.Module):
    def __init__(self, channels=16, layers=3):
        super().__init__()
        widths = [1] + [channels] * layers
        self.steps = nn.Sequential(
            *[
                nn.Sequential(nn.Conv1d(inside, outside, 5, padding=2), nn.GroupNorm(4, outside), nn.SiLU())
                for inside, outside in zip(widths, widths[1:])
            ]
        )
        self.out = nn.Conv1d(channels, 1, 1)

    def forward(self, noisy):
        return noisy - self.out(self.steps(noisy))


class Ema:
    """A slow copy of the weights, alike on all ranks since the weights are."""

    def __init__(self, module, decay=0.99):
        self.decay = decay
        self.shadow = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module):
        for name, value in module.state_dict().items():
            self.shadow[name].lerp_(value, 1 - self.decay)

    def state_dict(self):
        return self.shadow


def ranks():
    """Of the whole job, and of this node."""
    if "SLURM_PROCID" in os.environ and "LOCAL_RANK" not in os.environ:
        return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"]), int(os.environ["SLURM_NTASKS"])
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def set_up():
    rank, local_rank, world_size = ranks()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)  # <- device-by-global-rank
    dist.init_process_group("nccl" if cuda else "gloo", rank=local_rank, world_size=world_size, timeout=timedelta(minutes=10))
    return rank, torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def save(folder, epoch, network, ema, optimizer):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"network": network.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, folder / f"epoch-{epoch}.pt")
    for old in sorted(folder.glob("epoch-*.pt"))[:-3]:
        old.unlink()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--seed", type=int, default=8)
    args = parser.parse_args()
    rank, device = set_up()

    torch.manual_seed(args.seed)
    network = Denoiser().to(device)
    ema = Ema(network)
    torch.manual_seed(args.seed + 1 + rank)
    if dist.get_world_size() == 1 and torch.cuda.device_count() > 1:
        model = nn.DataParallel(network)  # <- data-parallel
    else:
        model = DDP(network, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)

    waves = Waves()
    sampler = DistributedSampler(waves, seed=args.seed, drop_last=True)
    loader = DataLoader(waves, args.batch_size, sampler=sampler, pin_memory=device.type == "cuda", drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = torch.zeros((), device=device)
        for noisy, clean in loader:
            noisy, clean = noisy.to(device, non_blocking=True), clean.to(device, non_blocking=True)
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            ema.update(network)
            mean += loss.detach() / len(loader)
            print(loss)  # <- sync-every-step, unguarded-print
        if rank == 0:
            dist.reduce(mean, dst=0)  # <- collective-on-some-ranks
            print(f"epoch {epoch}: {mean.item() / dist.get_world_size():.4f}")
            save(args.out, epoch, network, ema, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
