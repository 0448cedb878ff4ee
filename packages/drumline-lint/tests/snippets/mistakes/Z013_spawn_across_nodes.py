"""Two-node training without torchrun.  On node k:

python train.py --nodes 2 --node-rank k --master 10.0.4.1
"""
import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ctr import ClickLogs, DeepFM


def worker(gpu, args):
    world_size = args.nodes * args.gpus
    torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend="nccl",
        init_method=f"tcp://{args.master}:{args.port}",
        world_size=world_size,
        rank=gpu,
    )

    logs = ClickLogs(args.data)
    sampler = DistributedSampler(logs, shuffle=True)
    loader = DataLoader(logs, batch_size=4096, sampler=sampler, num_workers=4, pin_memory=True)

    model = DDP(DeepFM(logs.cardinalities).cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for features, clicked in loader:
            logits = model(features.cuda(gpu, non_blocking=True))
            loss = F.binary_cross_entropy_with_logits(logits, clicked.float().cuda(gpu))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"/nfs/ctr/deepfm_{epoch}.pt")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--master", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=23456)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--data", default="/nfs/ctr/logs")
    args = parser.parse_args()
    mp.spawn(worker, args=(args,), nprocs=args.gpus)


if __name__ == "__main__":
    main()
