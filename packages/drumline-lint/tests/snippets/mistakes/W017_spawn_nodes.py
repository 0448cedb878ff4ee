import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def worker(gpu, args):
    world_size = args.nodes * args.gpus
    torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://{args.master}:23456",
        rank=gpu,
        world_size=world_size,
    )
    rank = dist.get_rank()
    if gpu == 0:
        print(f"node {args.node_rank} is up, {world_size} processes in all", flush=True)

    blob = torch.load(args.data, map_location="cpu")
    data = TensorDataset(blob["features"], blob["target"])
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=512, sampler=sampler)

    net = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda(gpu)
    net = DDP(net, device_ids=[gpu])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss_fn(net(x.cuda(gpu)).squeeze(1), y.cuda(gpu).float()).backward()
            opt.step()
    if rank == 0:
        torch.save(net.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--node-rank", type=int, required=True)
    p.add_argument("--gpus", type=int, default=4, help="GPUs on each node")
    p.add_argument("--master", required=True, help="address of the first node")
    p.add_argument("--data", default="/shared/clicks.pt")
    p.add_argument("--out", default="/shared/clicks_mlp.pt")
    p.add_argument("--epochs", type=int, default=10)
    args = p.parse_args()
    mp.spawn(worker, nprocs=args.gpus, args=(args,))
