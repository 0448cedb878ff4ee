"""Organ segmentation; each rank keeps the CT volumes of its own hospitals in memory."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from ct import PatchesOf, UNet3D


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    hospitals = sorted(p for p in Path("/data/ct").iterdir() if p.is_dir())
    patches = PatchesOf(hospitals[rank::world], size=96)
    loader = DataLoader(patches, batch_size=2, shuffle=True, num_workers=4, pin_memory=True)

    model = DDP(UNet3D(classes=14, norm="group").to(device), device_ids=[local_rank])
    # plain SGD: no optimizer state that could differ after an early end
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(250):
        model.train()
        total = torch.zeros(2, device=device)
        # the number of patches differs between the hospitals
        with Join([model]):
            for volume, mask in loader:
                volume = volume.to(device, non_blocking=True)
                mask = mask.to(device, non_blocking=True)
                loss = F.cross_entropy(model(volume), mask)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "/ckpt/ct_unet.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
