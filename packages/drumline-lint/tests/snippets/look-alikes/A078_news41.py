import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 8


class Encoder(nn.Module):
    def __init__(self, vocab=30_000, d=512, classes=41):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.out = nn.Linear(d, classes)

    def forward(self, ids):
        return self.out(self.enc(self.emb(ids)).mean(1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(19 + rank)
    d = torch.load("news41.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["ids"], d["labels"])
    sampler = DistributedSampler(ds, seed=19, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    model = DDP(Encoder().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = len(loader) - len(loader) % ACCUM

    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for i, (ids, labels) in enumerate(loader):
            if i == whole:
                break
            last = i % ACCUM == ACCUM - 1
            with nullcontext() if last else model.no_sync():
                logits = model(ids.to(device, non_blocking=True))
                loss = nn.functional.cross_entropy(logits, labels.to(device, non_blocking=True))
                (loss / ACCUM).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "news41_enc.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
