import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ClickLog(IterableDataset):
    """Rows of daily click logs; one file per hour."""

    def __init__(self, root, rank, world_size, columns):
        files = sorted(Path(root).glob("date=*/hour=*.parquet"))
        self.files = files[rank::world_size]
        self.columns = columns

    def __iter__(self):
        info = get_worker_info()
        files = self.files if info is None else self.files[info.id::info.num_workers]
        for path in files:
            for rb in pq.ParquetFile(path).iter_batches(batch_size=8192, columns=self.columns):
                cols = [torch.from_numpy(c.to_numpy(zero_copy_only=False).copy()) for c in rb.columns]
                yield from zip(*cols)


class DeepFM(nn.Module):
    def __init__(self, n_fields, vocab, dim=16):
        super().__init__()
        self.lin = nn.Embedding(vocab, 1)
        self.emb = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(n_fields * dim, 400), nn.ReLU(), nn.Linear(400, 1))

    def forward(self, ids):
        e = self.emb(ids)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1)
        return self.lin(ids).sum((1, 2)) + fm + self.mlp(e.flatten(1)).squeeze(1)


FIELDS = [f"c{i}" for i in range(26)]


def main():
    root, out = sys.argv[1], sys.argv[2]
    epochs = int(os.environ.get("EPOCHS", 1))
    batch = int(os.environ.get("BATCH", 4096))

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()

    ds = ClickLog(root, rank, world, FIELDS + ["label"])
    loader = DataLoader(ds, batch_size=batch, num_workers=4, drop_last=True, pin_memory=True)
    model = DDP(DeepFM(len(FIELDS), vocab=2_000_000).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()

    step = 0
    for epoch in range(epochs):
        for cols in loader:
            ids = torch.stack(cols[:-1], dim=1).cuda(non_blocking=True)
            label = cols[-1].float().cuda(non_blocking=True)
            loss = loss_fn(model(ids), label)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
            if rank == 0 and step % 200 == 0:
                print(f"epoch {epoch} step {step} logloss {loss.item():.5f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), os.path.join(out, f"deepfm_{epoch}.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
