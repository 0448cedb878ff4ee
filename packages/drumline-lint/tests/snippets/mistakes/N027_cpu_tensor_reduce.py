import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from toxicity.data import CommentSet, collate
from toxicity.model import BertClassifier


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct, count = 0, 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        logits = model(batch["input_ids"], batch["attention_mask"])
        correct += (logits.argmax(-1) == batch["labels"]).sum().item()
        count += batch["labels"].size(0)
    totals = torch.tensor([correct, count], dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_ds, dev_ds = CommentSet("train.tsv"), CommentSet("dev.tsv")
    train_sampler = DistributedSampler(train_ds)
    train_loader = DataLoader(train_ds, 32, sampler=train_sampler, collate_fn=collate, drop_last=True)
    dev_loader = DataLoader(dev_ds, 64, sampler=DistributedSampler(dev_ds, shuffle=False),
                            collate_fn=collate)
    model = DDP(BertClassifier(6).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    ce = torch.nn.CrossEntropyLoss()

    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        model.train()
        for b in train_loader:
            b = {k: v.to(device) for k, v in b.items()}
            loss = ce(model(b["input_ids"], b["attention_mask"]), b["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc = evaluate(model, dev_loader, device)
        if is_main():
            print(f"epoch {epoch}: dev acc {acc:.4f}")
            torch.save(model.module.state_dict(), "bert_toxicity.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
