import os
from datetime import timedelta

import torch
import torch.distributed as dist
from datasets import load_dataset, load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BASE = "roberta-base"
CACHE = "/shared/patents/tok"


def tokenized(rank):
    if rank != 0:
        dist.barrier()
    if rank == 0:
        if not os.path.isdir(CACHE):
            tok = AutoTokenizer.from_pretrained(BASE)
            raw = load_dataset("json", data_files="/shared/patents/train.jsonl", split="train")
            raw = raw.map(lambda b: tok(b["abstract"], truncation=True, padding="max_length", max_length=384),
                          batched=True)
            raw.save_to_disk(CACHE)
        dist.barrier()
    return load_from_disk(CACHE).with_format("torch", columns=["input_ids", "attention_mask", "label"])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=2))
    rank = dist.get_rank()
    ds = tokenized(rank)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=4, drop_last=True)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=9).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for b in loader:
            loss = model(input_ids=b["input_ids"].cuda(), attention_mask=b["attention_mask"].cuda(),
                         labels=b["label"].cuda()).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        model.module.save_pretrained("patents")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
