import argparse

import torch
import torch.multiprocessing as mp

from worker import main_worker


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data/ade")
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--node-rank", type=int, default=0)
    p.add_argument("--dist-url", default="tcp://node0:23456")
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


if __name__ == "__main__":
    args = parse()
    args.gpus = torch.cuda.device_count()
    args.world_size = args.gpus * args.nodes
    mp.spawn(main_worker, nprocs=args.gpus, args=(args,))
