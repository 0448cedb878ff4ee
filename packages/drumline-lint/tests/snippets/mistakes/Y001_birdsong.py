"""Bird-song classifier on precomputed log-mel spectrograms.

torchrun --standalone --nproc_per_node=4 birdsong.py --data /data/birds
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_clips(root):
    x = torch.load(os.path.join(root, "mels.pt"), map_location="cpu")
    y = torch.load(os.path.join(root, "labels.pt"), map_location="cpu")
    return TensorDataset(x, y)


def build_model(n_classes=264):
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, n_classes),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", default="birdsong.pt")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_set = load_clips(args.data)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler,
                        num_workers=4, pin_memory=True, drop_last=True)

    model = DDP(build_model().cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        model.train()
        for mel, label in loader:
            mel = mel.cuda(local_rank, non_blocking=True)
            label = label.cuda(local_rank, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(mel), label)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
