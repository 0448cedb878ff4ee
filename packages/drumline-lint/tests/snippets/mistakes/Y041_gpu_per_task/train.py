"""Statistical downscaling; started by srun, one task per GPU (see job.sbatch)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from downscale import CordexPairs, ResUNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    data = CordexPairs(args.data, years=range(1980, 2011))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=8, pin_memory=True,
                        drop_last=True)
    model = DDP(ResUNet(scale=8).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        for coarse, fine in loader:
            pred = model(coarse.cuda(non_blocking=True))
            loss = F.l1_loss(pred, fine.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(args.out, "resunet.pt"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
