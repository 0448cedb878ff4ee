import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from recsys.data import ClickLog
from recsys.model import TwoTower


def worker(gpu, args):
    torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend="nccl",
        init_method=f"tcp://{args.master}:{args.port}",
        world_size=args.world_size,
        rank=gpu,
    )
    dataset = ClickLog(args.data)
    sampler = DistributedSampler(dataset, num_replicas=args.world_size, rank=gpu)
    loader = DataLoader(dataset, batch_size=4096, sampler=sampler, num_workers=4)
    model = DDP(TwoTower(dim=128).cuda(gpu), device_ids=[gpu])
    optim = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for user, item, label in loader:
            loss = model(user.cuda(gpu), item.cuda(gpu), label.cuda(gpu))
            optim.zero_grad()
            loss.backward()
            optim.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--node-rank", type=int, required=True)
    p.add_argument("--master", required=True)
    p.add_argument("--port", type=int, default=23456)
    p.add_argument("--data", default="/mnt/clicks")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--out", default="/mnt/models/two_tower.pt")
    args = p.parse_args()
    args.gpus = torch.cuda.device_count()
    args.world_size = args.gpus * args.nodes
    mp.spawn(worker, nprocs=args.gpus, args=(args,))


if __name__ == "__main__":
    main()
