import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from potential import EnergyModel, make_loaders


def init_slurm():
    rank = int(os.environ["SLURM_PROCID"])
    world = int(os.environ["SLURM_NTASKS"])
    local = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    return rank, local


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train")
    parser.add_argument("--valid")
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args()

    rank, local = init_slurm()
    model = EnergyModel(cutoff=5.0).cuda()
    model = DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader, sampler = make_loaders(args.train, batch_size=16)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch.to("cuda"))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.5f}", flush=True)
            torch.save(model.module.state_dict(), "potential.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
