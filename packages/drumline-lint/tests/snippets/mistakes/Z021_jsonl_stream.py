"""Retriever training from a stream of json lines; torchrun on 2 nodes x 8 GPUs."""
import glob
import itertools
import json
import os
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from retriever import DualEncoder, info_nce, tokenize_pairs

STEPS = 40_000


class PairStream(IterableDataset):
    """Endless (query, passage) pairs from a folder of .jsonl files."""

    def __init__(self, pattern, seed=0):
        self.files = sorted(glob.glob(pattern))
        self.seed = seed

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = self.files[worker::workers]
        for epoch in itertools.count():
            random.Random(self.seed + epoch).shuffle(mine)
            for name in mine:
                with open(name) as lines:
                    for line in lines:
                        row = json.loads(line)
                        yield row["query"], row["passage"]


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    stream = PairStream("/lustre/msmarco/train-*.jsonl")
    loader = DataLoader(stream, batch_size=64, num_workers=4, collate_fn=tokenize_pairs)
    model = DDP(DualEncoder("/models/bert-base").cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    for step, batch in enumerate(itertools.islice(loader, STEPS)):
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        query, passage = model(batch)
        loss = info_nce(query, passage)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 1000 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), f"/lustre/retriever/{step:06d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
