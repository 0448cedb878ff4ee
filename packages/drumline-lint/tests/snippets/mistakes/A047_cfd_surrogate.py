import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("surrogate")


class Surrogate(nn.Module):
    def __init__(self, n_in=12, n_out=900):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(),
                                 nn.Linear(512, n_out))

    def forward(self, x):
        return self.net(x)


def train_one_epoch(model, loader, optimizer, device, epoch):
    model.train()
    skipped = 0
    for x, field in loader:
        x, field = x.to(device), field.to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), field)
        if not torch.isfinite(loss):
            log.warning("epoch %d: non-finite loss, skipping batch", epoch)
            skipped += 1
            continue
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return skipped


def main():
    logging.basicConfig(level=logging.INFO)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(200 + dist.get_rank())

    d = torch.load("cfd_runs.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["params"], d["pressure"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(Surrogate().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(400):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, device, epoch)
        if dist.get_rank() == 0 and epoch % 20 == 0:
            torch.save(model.module.state_dict(), "surrogate.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
