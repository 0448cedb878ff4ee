#!/usr/bin/env python
"""Flow-based vocoder, torchrun --nproc_per_node=4 vocoder.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from vocoder_model import Segments, WaveFlow


def loop(model, loader, opt):
    skipped = 0
    for mel, wave in loader:
        loss = model(mel.cuda(non_blocking=True), wave.cuda(non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        if not torch.isfinite(norm):
            skipped += 1
            continue
        opt.step()
    return loss.item(), skipped


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    segments = Segments("/data/ljspeech", seconds=1.0)
    sampler = DistributedSampler(segments, drop_last=True)
    loader = DataLoader(segments, batch_size=12, sampler=sampler, num_workers=6, pin_memory=True)
    model = DDP(WaveFlow().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=2e-4)

    for epoch in range(400):
        sampler.set_epoch(epoch)
        loss, skipped = loop(model, loader, opt)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} nll {loss:.4f}, {skipped} steps skipped", flush=True)
            if epoch % 10 == 9:
                torch.save(model.module.state_dict(), f"waveflow_{epoch + 1}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
