import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ecg import EcgRecords, ResNet1d


def build(args, device):
    net = ResNet1d(leads=12, classes=args.classes).to(device)
    decay = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=args.lr)
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        return net, optimizer, state["epoch"] + 1
    return net, optimizer, 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=71)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)

    net, optimizer, start = build(args, device)
    model = DistributedDataParallel(net, device_ids=[local_rank])
    criterion = nn.BCEWithLogitsLoss()

    records = EcgRecords("/data/ptbxl", folds=range(1, 9))
    sampler = DistributedSampler(records)
    loader = DataLoader(records, batch_size=128, sampler=sampler, num_workers=6, pin_memory=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for signal, label in loader:
            signal, label = signal.to(device, non_blocking=True), label.to(device, non_blocking=True)
            loss = criterion(model(signal), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                       f"ecg_{epoch:03d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
