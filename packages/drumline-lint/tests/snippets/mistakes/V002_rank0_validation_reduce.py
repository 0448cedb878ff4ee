import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from speech.data import CommandDataset, pad_collate
from speech.model import Conformer


def validate(model, loader, device):
    model.eval()
    stats = torch.zeros(2, device=device)
    with torch.no_grad():
        for feats, lens, labels in loader:
            logits = model(feats.to(device), lens.to(device))
            labels = labels.to(device)
            stats[0] += (logits.argmax(-1) == labels).sum()
            stats[1] += labels.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)

    train_set, val_set = CommandDataset("train"), CommandDataset("dev")
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 64, sampler=train_sampler, collate_fn=pad_collate, num_workers=6)
    val_loader = DataLoader(val_set, 64, sampler=DistributedSampler(val_set, shuffle=False),
                            collate_fn=pad_collate, num_workers=2)

    model = DDP(Conformer(num_classes=35).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(40):
        train_sampler.set_epoch(epoch)
        model.train()
        for feats, lens, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(feats.to(device), lens.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        if rank == 0:
            acc = validate(model, val_loader, device)
            print(f"epoch={epoch} dev_acc={acc:.4f}")
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, "last.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
