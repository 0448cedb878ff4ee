import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from retriever import PairDataset, SparseEncoder


def setup():
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", init_method="env://")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--queries", required=True)
    args = parser.parse_args()
    setup()

    device = int(os.environ["LOCAL_RANK"])
    model = DistributedDataParallel(SparseEncoder().cuda(), device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    pairs = PairDataset(args.queries)
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, batch_size=64, sampler=sampler, num_workers=6, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for query, passage in loader:
            optimizer.zero_grad()
            model(query.cuda(), passage.cuda()).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "retriever.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
