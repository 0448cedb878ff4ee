# torchrun --nproc_per_node=4 rank_rng_state.py --run runs/a
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def checkpoint(run, epoch, model, opt):
    rank = dist.get_rank()
    torch.save({"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()},
               os.path.join(run, f"rng-{epoch:03d}-{rank}.pt"))
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()},
                   os.path.join(run, f"model-{epoch:03d}.pt"))
    dist.barrier()


def restore(run, epoch, model, opt, gpu):
    state = torch.load(os.path.join(run, f"model-{epoch:03d}.pt"), map_location=f"cuda:{gpu}")
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    rng = torch.load(os.path.join(run, f"rng-{epoch:03d}-{dist.get_rank()}.pt"), map_location="cpu")
    torch.set_rng_state(rng["cpu"])
    torch.cuda.set_rng_state(rng["cuda"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--run", required=True)
    ap.add_argument("--from-epoch", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(1000 + dist.get_rank())
    os.makedirs(args.run, exist_ok=True)

    d = torch.load("sensor.pt", map_location="cpu")
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, seed=0)
    loader = DataLoader(ds, 512, sampler=sampler)
    net = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 4))
    model = DDP(net.cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    if args.from_epoch >= 0:
        restore(args.run, args.from_epoch, model, opt, gpu)

    for epoch in range(args.from_epoch + 1, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        checkpoint(args.run, epoch, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
