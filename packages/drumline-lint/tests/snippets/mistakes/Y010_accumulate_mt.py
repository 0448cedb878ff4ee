import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from mt.batches import ParallelCorpus, collate
from mt.transformer import Seq2Seq, label_smoothed_nll

ACCUM = 8


def chunks(iterable, n):
    it = iter(iterable)
    while True:
        block = list(islice(it, n))
        if len(block) < n:
            return
        yield block


def train_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    total, updates = 0.0, 0
    for micro_batches in chunks(loader, ACCUM):
        optimizer.zero_grad(set_to_none=True)
        # talk to the other GPUs once per update, not once per micro-batch
        with model.no_sync():
            for src, tgt in micro_batches:
                src, tgt = src.to(device), tgt.to(device)
                logits = model(src, tgt[:, :-1])
                loss = label_smoothed_nll(logits, tgt[:, 1:]) / ACCUM
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        updates += 1
    return total / max(updates, 1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    corpus = ParallelCorpus("/data/wmt/de-en.bin")
    sampler = DistributedSampler(corpus, drop_last=True)
    loader = DataLoader(corpus, batch_size=64, sampler=sampler, collate_fn=collate,
                        num_workers=4, drop_last=True)
    model = DDP(Seq2Seq(vocab=32000).to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=7e-4, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 4000, (4000 / (s + 1)) ** 0.5))

    for epoch in range(12):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, scheduler, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f}", flush=True)
            torch.save(model.module.state_dict(), f"/ckpt/mt/epoch{epoch}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
