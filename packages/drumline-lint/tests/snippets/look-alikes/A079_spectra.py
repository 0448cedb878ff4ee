import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AmpStepper:
    def __init__(self, model, optimizer, max_norm):
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.scaler = GradScaler("cuda")

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def __call__(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(61 + rank)
    d = torch.load("spectra.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, seed=61, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True, pin_memory=True)
    net = nn.Sequential(nn.Conv1d(1, 64, 9, padding=4), nn.ReLU(), nn.AdaptiveAvgPool1d(16), nn.Flatten(),
                        nn.Linear(1024, 30))
    model = DDP(net.to(device), device_ids=[local_rank])
    step = AmpStepper(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), max_norm=2.0)
    for epoch in range(45):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            with autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            step(loss)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "scaler": step.scaler.state_dict()}, "spectra_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
