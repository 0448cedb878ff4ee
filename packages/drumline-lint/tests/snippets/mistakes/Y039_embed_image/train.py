"""Sentence-embedding training on all GPUs of the machine."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from embed import PairFile, SentenceEncoder, in_batch_softmax


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    data = PairFile(args.pairs)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True)
    model = DDP(SentenceEncoder().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for anchor, positive in loader:
            both = torch.cat([anchor, positive]).cuda(non_blocking=True)
            a, p = model(both).chunk(2)
            loss = in_batch_softmax(a, p)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
            torch.save(model.module.state_dict(), args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
