"""Linear probe on frozen features of the pretrained trunk. One GPU; start it with plain python.

The pretraining itself (pretrain.py) runs on eight GPUs; this script only reads its checkpoint.
"""
import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from trunk.data import ImageSet
from trunk.vit import vit_small


def strip(state):
    """Drop the prefix that DDP put before the names."""
    return {k.removeprefix("module."): v for k, v in state.items()}


@torch.no_grad()
def features(net, split, device):
    xs, ys = [], []
    for img, y in DataLoader(ImageSet("/data/imagenet100", split), 256, num_workers=8):
        xs.append(net(img.to(device)).float().cpu())
        ys.append(y)
    return TensorDataset(torch.cat(xs), torch.cat(ys))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("ckpt")
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--out", default="probe.pt")
    args = ap.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit("the probe is a single-process script")

    device = torch.device("cuda:0")
    torch.manual_seed(0)
    net = vit_small()
    net.load_state_dict(strip(torch.load(args.ckpt, map_location="cpu")["model"]))
    net = net.to(device).eval()

    train, val = features(net, "train", device), features(net, "val", device)
    train_dl = DataLoader(train, batch_size=1024, shuffle=True)
    val_dl = DataLoader(val, batch_size=4096)
    head = nn.Linear(384, 100).to(device)
    opt = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    best = 0.0
    for epoch in range(args.epochs):
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(head(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        with torch.no_grad():
            hits = sum((head(x.to(device)).argmax(-1) == y.to(device)).sum().item() for x, y in val_dl)
        acc = hits / len(val)
        print(f"epoch {epoch} acc {acc:.4f}")
        if acc > best:
            best = acc
            torch.save(head.state_dict(), args.out)
    print(f"best {best:.4f}")


if __name__ == "__main__":
    main()
