import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from diffusion import CelebHQ, UNet, noise_loss

FOLDER = Path("/checkpoints/celeb-unet")


def latest():
    found = sorted(FOLDER.glob("epoch_*.pt"))
    return found[-1] if found else None


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    FOLDER.mkdir(parents=True, exist_ok=True)

    data = CelebHQ("/data/celeb-hq", size=256)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    model = DDP(UNet(base=192).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    start = 0
    if rank == 0 and latest() is not None:
        state = torch.load(latest(), map_location="cuda:0")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
        print(f"resuming at epoch {start}", flush=True)
    dist.barrier()

    for epoch in range(start, 400):
        sampler.set_epoch(epoch)
        model.train()
        for images in loader:
            loss = noise_loss(model, images.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0 and epoch % 10 == 9:
            torch.save({"model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "epoch": epoch}, FOLDER / f"epoch_{epoch:04d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
