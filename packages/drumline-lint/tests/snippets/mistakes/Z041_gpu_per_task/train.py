import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from echo import EchoFrames, UNet


def main():
    rank = int(os.environ["SLURM_PROCID"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    frames = EchoFrames("/project/echo/frames")
    sampler = DistributedSampler(frames)
    loader = DataLoader(frames, batch_size=16, sampler=sampler, num_workers=8, pin_memory=True)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(UNet(1, 4)).cuda(local_rank)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for epoch in range(120):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            image, mask = image.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            loss = F.cross_entropy(model(image), mask)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "/project/echo/unet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
