import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from video import ClipDataset, VideoMAE


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", required=True)
    args = parser.parse_args()

    rank = int(os.environ["SLURM_PROCID"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))

    dataset = ClipDataset(args.clips, frames=16)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(
        dataset,
        batch_size=24,
        sampler=sampler,
        num_workers=12,
        pin_memory=True,
        persistent_workers=True,
    )
    model = DistributedDataParallel(VideoMAE().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4)

    for epoch in range(400):
        sampler.set_epoch(epoch)
        for clips in loader:
            optimizer.zero_grad(set_to_none=True)
            model(clips.cuda(non_blocking=True)).backward()
            optimizer.step()
        if rank == 0 and epoch % 20 == 19:
            torch.save(model.module.state_dict(), f"mae_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
