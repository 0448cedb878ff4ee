import glob

import torch


def make_stats(root, target):
    s = sq = n = 0.0
    for f in sorted(glob.glob(f"{root}/seq_*.pt")):
        x = torch.load(f, map_location="cpu").double()
        s, sq, n = s + x.sum().item(), sq + x.pow(2).sum().item(), n + x.numel()
    mean = s / n
    torch.save({"mean": mean, "std": (sq / n - mean * mean) ** 0.5}, target)


def load_stats(target):
    d = torch.load(target, map_location="cpu")
    return d["mean"], d["std"]
