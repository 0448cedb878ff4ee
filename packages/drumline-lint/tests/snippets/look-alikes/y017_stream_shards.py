"""Continued pretraining on maths pages, streamed. torchrun on 2 x 8 GPUs."""
import gzip
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mathlm import GPT, encode

STEPS = 50_000
BLOCK = 1024


class Pages(IterableDataset):
    """512 gzip files; each reader gets every n-th of them and repeats them."""

    def __init__(self, root, rank, world):
        self.files = sorted(Path(root).glob("*.jsonl.gz"))
        self.rank, self.world = rank, world

    def __iter__(self):
        info = get_worker_info()
        workers = info.num_workers if info else 1
        reader = self.rank * workers + (info.id if info else 0)
        mine = self.files[reader::self.world * workers]
        buffer = []
        while True:
            for path in mine:
                with gzip.open(path, "rt") as f:
                    for line in f:
                        buffer += encode(json.loads(line)["text"])
                        while len(buffer) > BLOCK:
                            yield torch.tensor(buffer[:BLOCK + 1])
                            del buffer[:BLOCK]


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    loader = DataLoader(Pages("/data/openwebmath", rank, world), batch_size=8, num_workers=4,
                        pin_memory=True)
    model = DDP(GPT(layers=24, width=1536).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95))

    for step, tokens in zip(range(STEPS), loader):
        tokens = tokens.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(step, loss.item(), flush=True)
        if rank == 0 and (step + 1) % 5000 == 0:
            torch.save(model.module.state_dict(), f"/ckpt/mathlm/{step + 1}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
