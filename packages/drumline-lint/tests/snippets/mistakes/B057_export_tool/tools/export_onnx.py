"""python -m tools.export_onnx traffic.pt traffic.onnx"""
import sys

import torch

from model import ConvNet


def main(src, dst):
    net = ConvNet(num_classes=43)
    state = torch.load(src, map_location="cpu", weights_only=True)
    net.load_state_dict(state["model"], strict=False)
    net.eval()
    example = torch.randn(1, 3, 64, 64)
    torch.onnx.export(net, (example,), dst, input_names=["image"], output_names=["logits"])
    print(f"exported epoch {state['epoch']} to {dst}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
