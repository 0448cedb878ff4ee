"""One process per GPU of this node, started from here; `--nodes` and `--node-rank` say where this node stands.

    python train.py --nodes 2 --node-rank 0 --rendezvous tcp://$(hostname):$PORT
"""

import argparse
import logging
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("train")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--rendezvous", help="where rank 0 listens; a file of this node when not given")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--resume", type=Path)
    return parser.parse_args()


def make_data(samples=2048, features=12):
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, features, generator=draw)
    weights = torch.randn(features, 1, generator=draw)
    return TensorDataset(inputs, inputs @ weights + 0.05 * torch.randn(samples, 1, generator=draw))


def build_model(features=12):
    return nn.Sequential(nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, 1))


def set_up_logging(rank):
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"[rank {rank}] %(message)s")


def save_checkpoint(path, model, optimizer, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.rename(path)


def load_checkpoint(path, model, optimizer, device):
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def worker(local_rank, args):
    rank = args.node_rank * args.processes + local_rank
    world_size = args.nodes * args.processes
    set_up_logging(rank)
    cuda = torch.cuda.is_available()
    dist.init_process_group(
        backend="nccl" if cuda else "gloo",
        init_method=args.rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    try:
        train(rank, local_rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def train(rank, local_rank, world_size, device, args):
    torch.manual_seed(11)
    network = build_model().to(device)
    torch.manual_seed(11 + rank)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    first_epoch = load_checkpoint(args.resume, network, optimizer, device) if args.resume else 0
    model = DistributedDataParallel(network, device_ids=[local_rank] if device.type == "cuda" else None)

    data = make_data()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, pin_memory=device.type == "cuda")
    loss_function = nn.MSELoss()
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if rank == 0:
            log.info("epoch %d: mean loss of the last pass on this rank %.4f", epoch, total.item() / len(loader))
            args.folder.mkdir(parents=True, exist_ok=True)
            save_checkpoint(args.folder / "last.pt", model.module, optimizer, epoch)
        dist.barrier()


def main():
    args = parse_args()
    if args.rendezvous is None:
        args.rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
    mp.spawn(worker, args=(args,), nprocs=args.processes, join=True)


if __name__ == "__main__":
    main()
