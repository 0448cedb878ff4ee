"""Causal LM on source code, streamed from gzip shards. torchrun, 2 x 8 GPUs."""
import glob
import gzip
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from codelm import GPT, encode

BLOCK = 2048
STEPS = 200_000


class CodeStream(IterableDataset):
    def __init__(self, pattern):
        self.files = sorted(glob.glob(pattern))

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        buffer = []
        while True:  # repeat for ever, training ends after STEPS
            for path in self.files[worker::workers]:
                with gzip.open(path, "rt") as f:
                    for line in f:
                        buffer.extend(encode(json.loads(line)["content"]))
                        while len(buffer) > BLOCK:
                            yield torch.tensor(buffer[:BLOCK + 1])
                            buffer = buffer[BLOCK:]


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    loader = DataLoader(CodeStream("/data/stack/python-*.jsonl.gz"), batch_size=8,
                        num_workers=4, pin_memory=True)
    model = DDP(GPT(layers=24, width=1024).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))

    for step, tokens in zip(range(STEPS), loader):
        tokens = tokens.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(step, loss.item(), flush=True)
        if rank == 0 and (step + 1) % 5000 == 0:
            torch.save(model.module.state_dict(), f"/ckpt/codelm/{step + 1:06d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
