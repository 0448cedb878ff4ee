import argparse
import os
import tarfile
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from PIL import Image
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import models, transforms

URL = "https://s3.amazonaws.com/fast-ai-imageclas/imagewoof2-320.tgz"


def fetch(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    archive = root / "imagewoof2-320.tgz"
    if not (root / "imagewoof2-320").exists():
        urllib.request.urlretrieve(URL, archive)
        with tarfile.open(archive) as tar:
            tar.extractall(root)
        archive.unlink()
    return root / "imagewoof2-320"


class Woof(Dataset):
    def __init__(self, folder: Path, tf):
        self.items = []
        for label, d in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
            self.items += [(f, label) for f in sorted(d.glob("*.JPEG"))]
        self.tf = tf

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, label = self.items[i]
        return self.tf(Image.open(path).convert("RGB")), label


def get_parser():
    ap = argparse.ArgumentParser(description="imagewoof baseline")
    ap.add_argument("--root", type=Path, default=Path("data"))
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--bs", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--ckpt", type=Path, default=Path("woof.pt"))
    return ap


def main():
    args = get_parser().parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank)

    folder = fetch(args.root)
    tf = transforms.Compose([transforms.RandomResizedCrop(224, (0.35, 1)), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    train = Woof(folder / "train", tf)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, args.bs, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)

    model = models.resnet18(weights=None, num_classes=10)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, epochs=args.epochs, steps_per_epoch=len(loader))
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        tot = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            out = model(x)
            loss = ce(out, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            tot[0] += (out.argmax(1) == y).sum()
            tot[1] += len(y)
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch}: train acc {(tot[0] / tot[1]).item():.3f}", flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, args.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
