"""Convert a training checkpoint to half precision weights: python -m tools.convert in.pt out.pt"""
import argparse

import torch

from model import ConvNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("source")
    ap.add_argument("target")
    ap.add_argument("--classes", type=int, default=10)
    args = ap.parse_args()
    state = torch.load(args.source, map_location="cpu", weights_only=True)
    net = ConvNet(args.classes)
    net.load_state_dict(state["model"])
    torch.save(net.half().state_dict(), args.target)
    print(f"wrote {args.target} (epoch {state['epoch']})")


if __name__ == "__main__":
    main()
