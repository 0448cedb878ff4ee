"""srun --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 --distribution=block python train_surrogate.py

(MASTER_ADDR and MASTER_PORT are exported by the batch script.)
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from wing import FourierMLP, PressureSamples


def main():
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    points = PressureSamples("/scratch/wing/points.h5")
    sampler = DistributedSampler(points, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(points, batch_size=8192, sampler=sampler, num_workers=2, pin_memory=True)

    model = DDP(FourierMLP(inputs=4, width=512).to(device), device_ids=[device])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        for xyz_t, pressure in loader:
            prediction = model(xyz_t.to(device, non_blocking=True))
            loss = F.smooth_l1_loss(prediction, pressure.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0 and epoch % 10 == 9:
            torch.save({"epoch": epoch, "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict()}, f"/scratch/wing/{epoch:04d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
