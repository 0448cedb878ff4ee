"""Restarted by torchrun: what one rank prepares, the others wait for, whether it succeeds or not."""

import contextlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FOLDER = Path(os.environ.get("FOLDER", "finally_out"))


@contextlib.contextmanager
def first_on_lead():
    """The lead does what is inside before the others."""
    lead = dist.get_rank() == 0
    if not lead:
        dist.barrier()
    try:
        yield lead
    finally:
        if lead:
            dist.barrier()


def prepare():
    with first_on_lead() as lead:
        if lead and not (FOLDER / "data.pt").exists():
            FOLDER.mkdir(parents=True, exist_ok=True)
            torch.save(torch.randn(64, 4), FOLDER / "data.pt")
    return torch.load(FOLDER / "data.pt", map_location="cpu", weights_only=True)


def resume(model, optimizer, device):
    path = FOLDER / "last.pt"
    found = [path.exists() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if not found[0]:
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=3))
    data = TensorDataset(prepare())
    torch.manual_seed(1)
    model = DDP(torch.nn.Linear(4, 4).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(resume(model, optimizer, device), 3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            x = x.to(device)
            optimizer.zero_grad()
            (model(x) - x).abs().mean().backward()
            optimizer.step()
        try:
            if dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, FOLDER / "last.tmp")
                (FOLDER / "last.tmp").rename(FOLDER / "last.pt")
        finally:
            dist.barrier()


if __name__ == "__main__":
    try:
        main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
