import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from docking import Complexes, DockNet


def main():
    rank = int(os.environ["SLURM_PROCID"])
    device = int(os.environ["SLURM_LOCALID"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
    data = Complexes("/work/docking/pdb")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=6)
    model = DistributedDataParallel(DockNet().cuda(), device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for ligand, pocket, target in loader:
            optimizer.zero_grad()
            out = model(ligand.cuda(), pocket.cuda())
            torch.nn.functional.mse_loss(out, target.cuda()).backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "docknet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
