import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from sonar import Pings, SonarNet


def main():
    rank = int(os.environ["SLURM_PROCID"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))

    pings = Pings("/shared/sonar/pings.h5")
    sampler = DistributedSampler(pings)
    loader = DataLoader(pings, batch_size=64, sampler=sampler, num_workers=6, pin_memory=True)
    model = DDP(SonarNet(classes=14).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)

    for epoch in range(80):
        sampler.set_epoch(epoch)
        for ping, kind in loader:
            loss = F.cross_entropy(model(ping.cuda(non_blocking=True)), kind.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"/shared/sonar/ckpt/{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
