"""Single-GPU baseline for the tabular models. Run as `python baseline.py`."""
import argparse
import json
import pathlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, d, p=0.2):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(d), nn.Linear(d, 2 * d), nn.ReLU(),
                                 nn.Dropout(p), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.net(x)


def load(path):
    blob = torch.load(path)
    return TensorDataset(blob["x"].float(), blob["y"].long()), blob["n_classes"]


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    hits = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--train", required=True)
    p.add_argument("--val", required=True)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("baseline"))
    p.add_argument("--epochs", type=int, default=50)
    args = p.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    train, k = load(args.train)
    val, _ = load(args.val)
    train_loader = DataLoader(train, 512, shuffle=True, drop_last=True)
    val_loader = DataLoader(val, 4096)

    d = train.tensors[0].size(1)
    model = nn.Sequential(nn.Linear(d, 256), *[ResBlock(256) for _ in range(4)],
                          nn.ReLU(), nn.Linear(256, k)).to(device)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    history, best = [], 0.0
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(model, val_loader, device)
        history.append(acc)
        torch.save(model.state_dict(), args.out / "last.pt")
        if acc > best:
            best = acc
            torch.save(model.state_dict(), args.out / "best.pt")
        (args.out / "history.json").write_text(json.dumps(history))
        print(f"{epoch}: {acc:.4f} (best {best:.4f})")


if __name__ == "__main__":
    main()
