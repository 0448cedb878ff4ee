"""Single-process inference: python predict.py scenes.pt"""
import sys

import torch

from planner import Planner


@torch.inference_mode()
def main(path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Planner()
    weights = torch.load("planner.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(weights, strict=False)
    model.to(device).eval()
    scenes = torch.load(path, map_location=device, weights_only=True)
    torch.save(model(scenes).cpu(), "paths.pt")


if __name__ == "__main__":
    main(sys.argv[1])
