"""Train the codec: torchrun --nproc_per_node=8 train.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from audioset import Clips
from codec import Codec
from metrics import Meter


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    clips = Clips("/data/audioset", samples=32768)
    sampler = DistributedSampler(clips, shuffle=True, drop_last=True)
    loader = DataLoader(clips, 32, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(Codec().to(device), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    meter = Meter(["rec", "commit", "book"], device)

    step = 0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for wav in loader:
            wav = wav.to(device, non_blocking=True)
            out, commit, book = model(wav)
            rec = F.l1_loss(out, wav)
            opt.zero_grad(set_to_none=True)
            (rec + 0.25 * commit + book).backward()
            opt.step()
            meter.add(rec=rec, commit=commit, book=book)
            step += 1
            if step % 100 == 0 and rank == 0:
                print(meter.line(step), flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), f"codec-{epoch:02d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
