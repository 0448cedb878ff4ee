"""Checks on a laptop that the model, the loss and the checkpoint survive the DDP wrapper (one process, CPU)."""
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def make_model():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))


def smoke(tmp):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29571", rank=0, world_size=1)
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    y = x[:, :3].argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    model = DistributedDataParallel(make_model())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = nn.CrossEntropyLoss()
    first = last = None
    for _ in range(10):
        for xb, yb in loader:
            loss = loss_fn(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            first = first if first is not None else loss.item()
            last = loss.item()

    path = Path(tmp) / "smoke.pt"
    torch.save(model.module.state_dict(), path)
    fresh = make_model()
    fresh.load_state_dict(torch.load(path))
    assert torch.equal(fresh(x), model.module(x))
    assert last < first, (first, last)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        smoke(tmp)
    print("ok")
