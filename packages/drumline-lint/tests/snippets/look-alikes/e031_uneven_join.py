import glob
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset


class Events(IterableDataset):
    """One jsonl file per day; files differ in length, each rank gets its own days."""

    def __init__(self, pattern, rank, world):
        self.files = sorted(glob.glob(pattern))[rank::world]
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(len(self.files), generator=torch.Generator().manual_seed(self.epoch))
        for k in order.tolist():
            with open(self.files[k]) as f:
                for line in f:
                    r = json.loads(line)
                    if len(r["items"]) > 1:
                        yield torch.tensor(r["items"][-100:])


def collate(seqs):
    x = pad_sequence(seqs, batch_first=True)
    return x[:, :-1], x[:, 1:]


class GRU4Rec(nn.Module):
    def __init__(self, n_items, d=256):
        super().__init__()
        self.emb = nn.Embedding(n_items, d, padding_idx=0)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, n_items)

    def forward(self, x):
        h, _ = self.gru(self.emb(x))
        return self.out(h)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    data = Events("/data/sessions/day_*.jsonl", rank, world)
    loader = DataLoader(data, batch_size=128, collate_fn=collate)
    model = DDP(GRU4Rec(60_000).cuda(), device_ids=[local])
    opt = torch.optim.Adagrad(model.parameters(), 0.05)

    for epoch in range(10):
        data.epoch = epoch
        n = 0
        with model.join():
            for x, y in loader:
                out = model(x.cuda(non_blocking=True))
                loss = nn.functional.cross_entropy(out.flatten(0, 1), y.cuda().flatten(), ignore_index=0)
                opt.zero_grad()
                loss.backward()
                opt.step()
                n += 1
        print(f"epoch {epoch} rank {rank}: {n} batches", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), "gru4rec.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
