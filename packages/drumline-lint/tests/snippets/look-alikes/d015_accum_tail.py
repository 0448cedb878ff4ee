"""Speaker verification with gradient accumulation."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from speaker.aam import AAMSoftmax
from speaker.data import Segments
from speaker.ecapa import ECAPA

ACCUM = 6


class Net(nn.Module):
    def __init__(self, n_speakers):
        super().__init__()
        self.trunk = ECAPA(channels=1024)
        self.head = AAMSoftmax(192, n_speakers)

    def forward(self, wav, who):
        return self.head(self.trunk(wav), who)


def train_epoch(model, loader, opt, device):
    model.train()
    n = len(loader)
    opt.zero_grad(set_to_none=True)
    for i, (wav, who) in enumerate(loader):
        first = i - i % ACCUM
        window = min(ACCUM, n - first)
        step_now = i + 1 == first + window
        with contextlib.nullcontext() if step_now else model.no_sync():
            loss = model(wav.to(device), who.to(device))
            (loss / window).backward()
        if not step_now:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return loss.item()


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    segments = Segments("/data/vox2", seconds=3)
    sampler = DistributedSampler(segments, shuffle=True, seed=2)
    loader = DataLoader(segments, 64, sampler=sampler, num_workers=8, drop_last=True)
    model = DDP(Net(segments.n_speakers).to(device), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 8, 0.5)

    for epoch in range(64):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, opt, device)
        sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.3f}", flush=True)
            torch.save(model.module.trunk.state_dict(), "ecapa.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
