import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lowlight.data import PairedImages
from lowlight.model import Restormer


def worker(rank, args):
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    ds = PairedImages(args.data)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(Restormer().cuda(), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for low, high in loader:
            loss = (model(low.cuda()) - high.cuda()).abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "restormer.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data")
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()
    n = torch.cuda.device_count()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    os.environ["WORLD_SIZE"] = str(n)
    mp.spawn(worker, args=(args,), nprocs=n)
