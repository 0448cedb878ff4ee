import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from interp import FlowNet, Triplets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--triplets", required=True)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    data = Triplets(args.triplets)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=6, drop_last=True)
    model = DistributedDataParallel(FlowNet().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-3)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        for first, middle, last in loader:
            optimizer.zero_grad()
            out = model(first.cuda(), last.cuda())
            torch.nn.functional.l1_loss(out, middle.cuda()).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "flownet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
