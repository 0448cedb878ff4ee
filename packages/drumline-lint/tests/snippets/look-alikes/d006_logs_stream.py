"""Anomaly model over log lines, streamed from many files."""
import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WIDTH, VOCAB = 64, 50_000
STEPS = 100_000


def slot():
    """This reader's number among all readers of all processes, and how many there are."""
    info = get_worker_info()
    wid, nw = (info.id, info.num_workers) if info else (0, 1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return rank * nw + wid, world * nw


class LogLines(IterableDataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).rglob("*.log"))

    def encode(self, line):
        ids = [zlib.crc32(w.encode()) % VOCAB for w in line.split()[:WIDTH]]
        return torch.tensor(ids + [0] * (WIDTH - len(ids)))

    def __iter__(self):
        me, n = slot()
        while True:
            for path in self.files[me::n]:
                with open(path, errors="replace") as fh:
                    for line in fh:
                        yield self.encode(line)


class AutoEncoder(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.enc(self.emb(ids))
        return self.out(h[:, :-1])


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    loader = DataLoader(LogLines("/data/logs"), batch_size=64, num_workers=4, pin_memory=True)
    model = DDP(AutoEncoder().cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    batches = iter(loader)
    for step in range(STEPS):
        ids = next(batches).cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 1000 == 0 and dist.get_rank() == 0:
            print(step, f"{loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), "logs_ae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
