"""Multilingual sentiment classifier with early stopping (torchrun --nproc_per_node=N)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

MODEL = "xlm-roberta-base"
MAX_EPOCHS = 20
PATIENCE = 2


class EarlyStopper:
    def __init__(self, patience, min_delta=1e-4):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = float("inf"), 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


@torch.no_grad()
def validation_loss(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total += F.cross_entropy(logits, batch["labels"], reduction="sum").item()
        count += batch["labels"].numel()
    return total / max(count, 1)


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = load_from_disk("data/mteb_sentiment_tokenized").with_format("torch")
    collate = DataCollatorWithPadding(AutoTokenizer.from_pretrained(MODEL))
    train_sampler = DistributedSampler(data["train"], shuffle=True)
    dev_sampler = DistributedSampler(data["validation"], shuffle=False)
    train_loader = DataLoader(data["train"], 32, sampler=train_sampler, collate_fn=collate)
    dev_loader = DataLoader(data["validation"], 64, sampler=dev_sampler, collate_fn=collate)

    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=3).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    stopper = EarlyStopper(PATIENCE)

    for epoch in range(MAX_EPOCHS):
        train_sampler.set_epoch(epoch)
        model.train()
        for batch in train_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        val = validation_loss(model, dev_loader, device)
        if rank == 0:
            torch.save(model.module.state_dict(), f"sentiment_{epoch:02d}.pt")
        print(f"[rank {rank}] epoch {epoch} shard loss {val:.4f}", flush=True)
        if stopper.step(val):
            print(f"[rank {rank}] stopping early")
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
