"""Started by `python -m torch.distributed.run`: all that is done is nested in main."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device(f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    lead = rank == 0

    def say(*words):
        if lead:
            print(*words, flush=True)

    def collect(value):
        """Of all ranks, on the first one."""
        if lead:
            parts = [torch.zeros_like(value) for _ in range(size)]
            dist.gather(value, parts, dst=0)
            return torch.stack(parts)
        else:
            dist.gather(value, dst=0)
            return None

    def build():
        torch.manual_seed(11)
        net = torch.nn.Linear(6, 1).to(device)
        return DDP(net, device_ids=[local] if device.type == "cuda" else None)

    def epoch_of(model, optimizer, loader):
        losses = []
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x.to(device)).squeeze(1) - y.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
    say("ranks:", size)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96))
    torch.manual_seed(100 + rank)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        means = collect(epoch_of(model, optimizer, loader))
        if means is not None:
            say(f"epoch {epoch}:", means.mean().item())
    if not lead:
        dist.barrier()
    else:
        torch.save(model.module.state_dict(), "nested.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
