import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def any_rank(flag, device):
    t = torch.tensor(int(flag), device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


class FlowField(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 48, 5, padding=2), nn.GELU(), nn.Conv2d(48, 2, 5, padding=2))

    def forward(self, x):
        return self.net(x)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(14 + rank)
    d = torch.load("piv.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["frames"], d["flow"])
    sampler = DistributedSampler(ds, seed=14, drop_last=True)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(FlowField().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    skipped = 0
    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for frames, flow in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.l1_loss(model(frames.to(device)), flow.to(device))
            if any_rank(not torch.isfinite(loss), device):
                skipped += 1
                continue
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}, {skipped} batches skipped so far")
            torch.save(model.module.state_dict(), "piv.ckpt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
