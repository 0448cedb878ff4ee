"""Turn a training checkpoint into ONNX. Plain python, one process:

    python Q004_export_tool.py --ckpt runs/last.pt --out model.onnx
"""
import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn


class GlobalPool(nn.Module):
    """averages features over all ranks while training"""

    def forward(self, x):
        x = x.mean((2, 3))
        if self.training and dist.get_world_size() > 1:
            dist.all_reduce(x)
            x = x / dist.get_world_size()
        return x


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
        self.pool = GlobalPool()
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        return self.fc(self.pool(self.body(x)))


def strip_prefix(state):
    return {k.removeprefix("module."): v for k, v in state.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--classes", type=int, default=10)
    args = ap.parse_args()

    with tempfile.NamedTemporaryFile() as f:
        dist.init_process_group("gloo", init_method=f"file://{f.name}_store", rank=0, world_size=1)
        net = Net(args.classes)
        state = torch.load(args.ckpt, map_location="cpu")
        net.load_state_dict(strip_prefix(state["model"]))
        net.eval()
        torch.onnx.export(net, torch.zeros(1, 3, 224, 224), args.out, input_names=["image"], output_names=["logits"])
        torch.save(net.state_dict(), args.out.replace(".onnx", ".pt"))
        dist.destroy_process_group()
    print("wrote", args.out)


if __name__ == "__main__":
    main()
