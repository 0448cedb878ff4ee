import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import wandb
from torch.utils.data import DataLoader, TensorDataset


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, required=True)
    ap.add_argument("--width", type=int, required=True)
    ap.add_argument("--seed", type=int, required=True)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    name = f"lr{args.lr}_w{args.width}_s{args.seed}"
    out = Path("sweep") / name
    out.mkdir(parents=True, exist_ok=True)
    wandb.init(project="qm9-sweep", name=name, config=vars(args))

    blob = torch.load("qm9_descriptors.pt", map_location="cpu")
    loader = DataLoader(TensorDataset(blob["x"], blob["y"]), 512, shuffle=True)
    net = nn.Sequential(nn.Linear(blob["x"].size(1), args.width), nn.SiLU(), nn.Linear(args.width, args.width),
                        nn.SiLU(), nn.Linear(args.width, 1)).to("cuda")
    opt = torch.optim.Adam(net.parameters(), args.lr)
    for epoch in range(100):
        for x, y in loader:
            loss = F.l1_loss(net(x.to("cuda")).squeeze(1), y.to("cuda"))
            opt.zero_grad()
            loss.backward()
            opt.step()
        wandb.log({"mae": loss.item()}, step=epoch)
        torch.save(net.state_dict(), out / "last.pt")
    wandb.finish()


if __name__ == "__main__":
    main()
