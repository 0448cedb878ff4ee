import argparse

import torch
import torch.multiprocessing as mp

from worker import main_worker


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data/dtd")
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--node-rank", type=int, required=True)
    p.add_argument("--dist-url", default="tcp://node0:23456")
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    args.gpus = torch.cuda.device_count()
    mp.spawn(main_worker, nprocs=args.gpus, args=(args,))
