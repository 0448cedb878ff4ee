import argparse
import csv
from pathlib import Path

import torch
from PIL import Image
from torchvision import transforms

from net import build_model


@torch.inference_mode()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder", type=Path)
    ap.add_argument("--weights", default="best.pt")
    ap.add_argument("--csv", default="out.csv")
    args = ap.parse_args()

    checkpoint = torch.load(args.weights)
    state = {k.removeprefix("module."): v for k, v in checkpoint["model"].items()}
    model = build_model(num_classes=len(checkpoint["classes"])).cuda()
    model.load_state_dict(state)
    model.eval()

    tf = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    with open(args.csv, "w", newline="") as f:
        w = csv.writer(f)
        w.writerow(["file", "class", "score"])
        for p in sorted(args.folder.glob("*.jpg")):
            x = tf(Image.open(p).convert("RGB"))[None].cuda()
            prob = model(x).softmax(1)[0]
            k = int(prob.argmax())
            w.writerow([p.name, checkpoint["classes"][k], f"{prob[k]:.4f}"])


if __name__ == "__main__":
    main()
