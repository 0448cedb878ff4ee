import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from galaxies import GalaxyZoo, EquivariantNet

RUN = Path("/lustre/galaxies/run3")


def rng_state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
    }


def checkpoint(epoch, model, optimizer):
    rank = dist.get_rank()
    folder = RUN / f"epoch{epoch:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(rng_state(), folder / f"rng_{rank:04d}.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
                   folder / "train.pt")
    dist.barrier()
    if rank == 0:
        (RUN / "latest").write_text(folder.name)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    seed = 100 + dist.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    galaxies = GalaxyZoo("/lustre/galaxies/data")
    sampler = DistributedSampler(galaxies, seed=100)
    loader = DataLoader(galaxies, batch_size=64, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(EquivariantNet(37).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        for image, votes in loader:
            prediction = model(image.cuda(non_blocking=True))
            loss = F.mse_loss(prediction, votes.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        checkpoint(epoch, model, optimizer)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
