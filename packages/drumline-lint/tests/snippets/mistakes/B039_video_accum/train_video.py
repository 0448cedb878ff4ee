import argparse

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models.video import r2plus1d_18

import comm
from clips import ClipFolder


def train_epoch(model, loader, optimizer, device, accum_steps):
    model.train()
    running = 0.0
    for i, (clip, label) in enumerate(loader):
        clip, label = clip.to(device, non_blocking=True), label.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clip), label) / accum_steps
        loss.backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
        running += loss.item() * accum_steps
    return running / len(loader)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data/kinetics/train")
    ap.add_argument("--batch-size", type=int, default=6)
    ap.add_argument("--accum-steps", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=45)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()

    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(6 + comm.rank())
    data = ClipFolder(args.root)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=8, drop_last=True)
    model = DDP(r2plus1d_18(weights=None, num_classes=len(data.classes)).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, device, args.accum_steps)
        stats = comm.reduce_dict({"loss": loss}, device)
        if comm.is_primary():
            print(epoch, stats)
            torch.save(model.module.state_dict(), "r2plus1d.pt")
    comm.teardown()


if __name__ == "__main__":
    main()
