"""Export a trained classifier to ONNX.

    python export_onnx.py checkpoints/model_089.pth model.onnx
"""
import argparse
import collections
import sys

import torch
import torchvision


def strip_prefix(state, prefix="module."):
    out = collections.OrderedDict()
    for k, v in state.items():
        out[k[len(prefix):] if k.startswith(prefix) else k] = v
    return out


def load_weights(path, ema):
    ckpt = torch.load(path, map_location="cpu", weights_only=True)
    key = "model_ema" if ema and "model_ema" in ckpt else "model"
    return strip_prefix(ckpt[key]), ckpt.get("epoch", -1)


def check(model, onnx_path, x):
    import onnxruntime as ort

    session = ort.InferenceSession(onnx_path, providers=["CPUExecutionProvider"])
    got = session.run(None, {"image": x.numpy()})[0]
    with torch.no_grad():
        want = model(x).numpy()
    return abs(got - want).max()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("checkpoint")
    ap.add_argument("output")
    ap.add_argument("--arch", default="resnet50")
    ap.add_argument("--classes", type=int, default=1000)
    ap.add_argument("--size", type=int, default=224)
    ap.add_argument("--no-ema", action="store_true")
    ap.add_argument("--opset", type=int, default=17)
    args = ap.parse_args()

    model = torchvision.models.get_model(args.arch, weights=None, num_classes=args.classes)
    weights, epoch = load_weights(args.checkpoint, ema=not args.no_ema)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    unexpected = [k for k in unexpected if k != "n_averaged"]
    if missing or unexpected:
        print("missing:", missing, "unexpected:", unexpected, file=sys.stderr)
        return 1
    model.eval()

    x = torch.randn(1, 3, args.size, args.size)
    torch.onnx.export(model, x, args.output, input_names=["image"], output_names=["logits"],
                      dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}}, opset_version=args.opset)
    err = check(model, args.output, x)
    print(f"exported epoch {epoch} to {args.output}, max deviation {err:.2e}")
    torch.save(model.state_dict(), args.output + ".pt")
    return 0 if err < 1e-3 else 2


if __name__ == "__main__":
    sys.exit(main())
