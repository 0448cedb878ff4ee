import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from datasets import load_from_disk
from transformers import AutoModelForSequenceClassification


def train_epoch(model, loader, opt, accum, device):
    model.train()
    n = len(loader)
    for i, batch in enumerate(loader):
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        update = (i + 1) % accum == 0 or i + 1 == n
        with nullcontext() if update else model.no_sync():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = F.cross_entropy(logits, batch["label"]) / accum
            loss.backward()
        if update:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
    return loss.item() * accum


def main():
    p = argparse.ArgumentParser(description="torchrun --nproc_per_node=4 Q014_accum_no_sync.py")
    p.add_argument("--data", default="data/imdb_tok")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--epochs", type=int, default=3)
    a = p.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    ds = load_from_disk(a.data)["train"].with_format("torch")
    sampler = DistributedSampler(ds, seed=5)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=2, pin_memory=True)
    net = AutoModelForSequenceClassification.from_pretrained("albert-base-v2", num_labels=2).to(device)
    model = DDP(net, device_ids=[local_rank], find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), 2e-5)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, opt, a.accum, device)
        if dist.get_rank() == 0:
            print(epoch, loss)
            net.save_pretrained("out/albert")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
