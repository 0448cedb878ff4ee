"""Copies the shards to each node's SSD, then trains.   torchrun, 4 nodes with 8 GPUs each."""
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from video import ClipDataset, build_model

SHARED, SSD = Path("/lustre/kinetics"), Path("/local_ssd/kinetics")


def stage_data(rank, local_rank, world, per_node):
    """The first process of every node gets the list from rank 0 and copies the files."""
    leaders = list(range(0, world, per_node))
    if local_rank == 0:
        group = dist.new_group(leaders)
        listing = [sorted(p.name for p in SHARED.glob("*.tar")) if rank == 0 else None]
        dist.broadcast_object_list(listing, src=0, group=group)
        SSD.mkdir(parents=True, exist_ok=True)
        for name in listing[0]:
            if not (SSD / name).exists():
                shutil.copy(SHARED / name, SSD / name)
    dist.barrier()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    stage_data(rank, local_rank, world, per_node)

    clips = ClipDataset(SSD, frames=16)
    sampler = DistributedSampler(clips)
    loader = DataLoader(clips, batch_size=8, sampler=sampler, num_workers=8)
    model = DDP(build_model(classes=400).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for clip, label in loader:
            loss = F.cross_entropy(model(clip.cuda()), label.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), SHARED.parent / "kinetics.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
