import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from clip_model import ClipModel, PairDataset


def main():
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    pairs = PairDataset("/fsx/clip/pairs")
    sampler = DistributedSampler(pairs, shuffle=True, drop_last=True)
    loader = DataLoader(pairs, batch_size=256, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True)
    model = DistributedDataParallel(ClipModel().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for epoch in range(32):
        sampler.set_epoch(epoch)
        for image, text in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = model(image.cuda(non_blocking=True), text.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"clip_{epoch:02d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
