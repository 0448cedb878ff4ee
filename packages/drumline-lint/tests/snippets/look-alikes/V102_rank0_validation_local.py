import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from speech.data import CommandDataset, pad_collate
from speech.model import Conformer


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    right = seen = 0
    for feats, lens, labels in loader:
        logits = net(feats.to(device), lens.to(device))
        right += (logits.argmax(-1) == labels.to(device)).sum().item()
        seen += labels.numel()
    net.train()
    return right / seen


def main():
    dist.init_process_group("nccl", timeout=timedelta(hours=2))
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)

    train_set = CommandDataset("train")
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 64, sampler=sampler, collate_fn=pad_collate, num_workers=6)
    val_loader = DataLoader(CommandDataset("dev"), 256, collate_fn=pad_collate, num_workers=2)

    model = DDP(Conformer(num_classes=35).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(40):
        sampler.set_epoch(epoch)
        for feats, lens, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(feats.to(device), lens.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        if rank == 0:
            acc = validate(model.module, val_loader, device)
            print(f"epoch={epoch} dev_acc={acc:.4f}")
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, "last.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
