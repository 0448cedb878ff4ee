import argparse
import itertools
import json
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class JsonlStream(IterableDataset):
    def __init__(self, shards, length, rank, world_size, seed=5):
        self.shards, self.length = sorted(shards), length
        self.rank, self.world_size, self.seed = rank, world_size, seed

    def _mine(self, epoch):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = list(self.shards)
        random.Random(self.seed + epoch).shuffle(order)
        return order[self.rank * workers + worker::self.world_size * workers]

    def __iter__(self):
        for epoch in itertools.count():
            for shard in self._mine(epoch):
                with open(shard) as f:
                    for line in f:
                        ids = json.loads(line)["ids"][: self.length]
                        yield torch.tensor(ids + [0] * (self.length - len(ids)))


class CharLM(nn.Module):
    def __init__(self, vocab=256, d=768):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, 3, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("shards", nargs="+")
    ap.add_argument("--steps", type=int, default=50000)
    ap.add_argument("--bs", type=int, default=64)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--out", default="charlm.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(args.shards) < world * args.workers:
        raise SystemExit("need at least one shard per rank and worker")

    stream = JsonlStream(args.shards, 512, rank, world)
    loader = DataLoader(stream, args.bs, num_workers=args.workers)
    model = DDP(CharLM().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, ids in zip(range(args.steps), loader):
        ids = ids.cuda(non_blocking=True)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if rank == 0 and step % 100 == 0:
            print(step, f"{loss.item():.4f}", flush=True)
        if rank == 0 and step % 5000 == 4999:
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
