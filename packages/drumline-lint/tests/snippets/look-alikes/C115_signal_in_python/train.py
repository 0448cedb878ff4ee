import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from gan import Autoencoder, Faces

asked = False


def remember(signum, frame):
    global asked
    asked = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGUSR1, remember)

    rank, local_rank = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)

    faces = Faces("/data/ffhq")
    sampler = DistributedSampler(faces)
    loader = DataLoader(faces, batch_size=32, sampler=sampler, num_workers=6, drop_last=True)
    model = DistributedDataParallel(Autoencoder().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    stop = torch.zeros(1, device="cuda")
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for image in loader:
            image = image.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.l1_loss(model(image), image).backward()
            optimizer.step()
            stop.fill_(float(asked))
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
        if rank == 0:
            torch.save(model.module.state_dict(), args.out / "last.pt")
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
