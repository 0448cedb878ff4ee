"""Polymer property model; srun starts one task per GPU (job.sbatch)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from polymers import PolymerGraphs, PropertyNet


def main():
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    # Slurm shows this task one GPU only
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    data = PolymerGraphs("/projects/poly/train.h5")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=6, pin_memory=True,
                        drop_last=True)
    model = DDP(PropertyNet().to(device), device_ids=[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for nodes, edges, target in loader:
            pred = model(nodes.to(device), edges.to(device))
            loss = F.l1_loss(pred, target.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "/projects/poly/ckpt/model.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
