"""Train the 6-hour forecast model on 4 nodes of 8 A100:

srun torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d \
     --rdzv_endpoint=$HEAD:29500 --rdzv_id=$SLURM_JOB_ID train_weather.py
"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from weather.era import EraPairs
from weather.swin import SwinForecast


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)

    dataset = EraPairs("/lustre/era5/zarr", years=range(1979, 2016))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=6,
                        pin_memory=True, persistent_workers=True)

    model = SwinForecast(channels=69, dim=768, depth=24).to(device)
    model = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
    weights = dataset.latitude_weights().to(device)

    for epoch in range(80):
        sampler.set_epoch(epoch)
        for now, later in loader:
            now = now.to(device, non_blocking=True)
            later = later.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = (weights * (model(now) - later).square()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            torch.save({"epoch": epoch, "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict()},
                       f"/lustre/weather/ckpt/{epoch:03d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
