"""Turn a training checkpoint into TorchScript for the phone app."""
import argparse

import torch
from torch import nn


class Gesture(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(6, 32, 7, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 64, 5, stride=2), nn.BatchNorm1d(64), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        return self.classifier(self.features(x)).softmax(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("checkpoint")
    ap.add_argument("output")
    ap.add_argument("--classes", type=int, default=12)
    args = ap.parse_args()

    state = torch.load(args.checkpoint, map_location="cpu")
    weights = {k[len("module."):] if k.startswith("module.") else k: v for k, v in state["model"].items()}
    net = Gesture(args.classes).eval()
    net.load_state_dict(weights)

    example = torch.zeros(1, 6, 200)
    with torch.no_grad():
        script = torch.jit.trace(net, example)
        gap = (script(example) - net(example)).abs().max().item()
    assert gap < 1e-6, gap
    script.save(args.output)
    print(f"wrote {args.output}, epoch {state['epoch']}")


if __name__ == "__main__":
    main()
