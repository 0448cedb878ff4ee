"""Robustness of a trained model on ImageNet-C. One GPU: python f017_eval_imagenet_c.py ckpt.pth"""
import argparse
import csv
from pathlib import Path

import torch
import torchvision.models as models
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

CORRUPTIONS = [
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur",
    "zoom_blur", "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate",
    "jpeg_compression",
]


def load_model(path, arch, device):
    state = torch.load(path, map_location="cpu")
    state = state.get("model", state)
    # trained with DistributedDataParallel, saved with the wrapper's prefix
    state = {k.removeprefix("module."): v for k, v in state.items()}
    model = getattr(models, arch)(weights=None)
    model.load_state_dict(state)
    return model.to(device).eval()


@torch.inference_mode()
def error_rate(model, root, batch_size, device):
    tf = T.Compose([T.CenterCrop(224), T.ToTensor(),
                    T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    loader = DataLoader(ImageFolder(root, tf), batch_size=batch_size, num_workers=8, pin_memory=True)
    wrong = total = 0
    for images, labels in loader:
        pred = model(images.to(device, non_blocking=True)).argmax(1).cpu()
        wrong += (pred != labels).sum().item()
        total += labels.numel()
    return wrong / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--root", type=Path, default=Path("/data/imagenet-c"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--csv", type=Path, default=Path("imagenet_c.csv"))
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(args.checkpoint, args.arch, device)

    rows = []
    for name in CORRUPTIONS:
        errors = [error_rate(model, args.root / name / str(s), args.batch_size, device) for s in range(1, 6)]
        rows.append([name, *[f"{e:.4f}" for e in errors], f"{sum(errors) / 5:.4f}"])
        print(*rows[-1], flush=True)

    with args.csv.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["corruption", "s1", "s2", "s3", "s4", "s5", "mean"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
