"""Hyper-parameter sweep, one independent single-GPU trial per GPU at a time."""
import argparse
import itertools
import json
import os
import subprocess
import sys
import time


def trial(cfg):
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    device = torch.device("cuda")
    d = torch.load("/data/telemetry.pt", map_location="cpu")
    train = DataLoader(TensorDataset(d["x"], d["y"]), batch_size=cfg["batch"], shuffle=True, drop_last=True)
    net = nn.Sequential(nn.Linear(d["x"].size(1), cfg["width"]), nn.ReLU(), nn.Linear(cfg["width"], 1)).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    for _ in range(20):
        for x, y in train:
            loss = nn.functional.mse_loss(net(x.to(device)).squeeze(1), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
    with torch.no_grad():
        val = nn.functional.mse_loss(net(d["xv"].to(device)).squeeze(1), d["yv"].to(device)).item()
    with open(f"sweep/{cfg['id']:03d}.json", "w") as fh:
        json.dump({**cfg, "val": val}, fh)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gpus", type=int, default=4)
    ap.add_argument("--trial")
    args = ap.parse_args()
    if args.trial:
        trial(json.loads(args.trial))
        return
    os.makedirs("sweep", exist_ok=True)
    grid = itertools.product([1e-3, 3e-4], [256, 1024], [128, 512])
    todo = [dict(id=i, lr=lr, batch=b, width=w) for i, (lr, b, w) in enumerate(grid)]
    running = {}
    while todo or running:
        for gpu in range(args.gpus):
            if gpu in running and running[gpu].poll() is not None:
                del running[gpu]
            if gpu not in running and todo:
                env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
                running[gpu] = subprocess.Popen(
                    [sys.executable, __file__, "--trial", json.dumps(todo.pop(0))], env=env)
        time.sleep(2)


if __name__ == "__main__":
    main()
