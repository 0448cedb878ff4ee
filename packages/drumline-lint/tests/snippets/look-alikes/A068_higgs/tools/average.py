"""python tools/average.py higgs_*.pt --test higgs_test.pt --out higgs_avg.pt"""
import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mlp import MLP  # noqa: E402


@torch.inference_mode()
def accuracy(model, path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    right = 0
    for x, y in DataLoader(TensorDataset(d["x"], d["y"]), batch_size=8192):
        right += ((model(x).squeeze(-1) > 0) == y.bool()).sum().item()
    return right / len(d["y"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("files", nargs="+")
    ap.add_argument("--test", required=True)
    ap.add_argument("--out", required=True)
    args = ap.parse_args()
    states = [torch.load(f, map_location="cpu", weights_only=True) for f in args.files]
    mean = {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}
    model = MLP().eval()
    model.load_state_dict(mean)
    torch.save(mean, args.out)
    print(f"{accuracy(model, args.test):.4f}")


if __name__ == "__main__":
    main()
