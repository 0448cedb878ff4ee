from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding


class EarlyStopper:
    def __init__(self, patience: int, min_delta: float = 0.0):
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.bad = 0

    def should_stop(self, value: float) -> bool:
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def make_loaders(args, tok):
    raw = load_dataset("glue", "mnli")
    enc = raw.map(lambda b: tok(b["premise"], b["hypothesis"], truncation=True, max_length=128), batched=True)
    enc = enc.rename_column("label", "labels")
    enc.set_format("torch", columns=["input_ids", "attention_mask", "labels"])
    train, val = enc["train"], enc["validation_matched"]
    collate = DataCollatorWithPadding(tok)
    ts = DistributedSampler(train, shuffle=True)
    vs = DistributedSampler(val, shuffle=False, drop_last=True)
    return (DataLoader(train, args.bs, sampler=ts, collate_fn=collate, num_workers=2), ts,
            DataLoader(val, args.bs, sampler=vs, collate_fn=collate, num_workers=2))


@torch.no_grad()
def val_loss(model, loader, device) -> float:
    model.eval()
    total, n = 0.0, 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        total += model(**batch).loss.item()
        n += 1
    return total / max(n, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="bert-base-uncased")
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--max-epochs", type=int, default=20)
    ap.add_argument("--patience", type=int, default=2)
    ap.add_argument("--out", default="mnli")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(args.model)
    train_dl, train_sampler, val_dl = make_loaders(args, tok)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=3).to(device)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    stopper = EarlyStopper(args.patience)

    for epoch in range(args.max_epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for batch in train_dl:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        current = val_loss(model, val_dl, device)
        if stopper.should_stop(current):
            print(f"[rank {rank}] stopping at epoch {epoch}, val loss {current:.4f}")
            break

    if rank == 0:
        model.module.save_pretrained(args.out)
        tok.save_pretrained(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
