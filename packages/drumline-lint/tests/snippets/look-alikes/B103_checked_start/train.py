import argparse

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, Resize, ToTensor

from model import ConvNet
from run import claim_folder
from utils.dist import all_reduce_sum, cleanup, init_distributed, is_main_process, save_on_master, seed_everything


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data/tools")
    ap.add_argument("--out", default="runs/tools")
    ap.add_argument("--overwrite", action="store_true")
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()
    device = init_distributed()
    seed_everything(0)
    out = claim_folder(args.out, args.overwrite, device)
    data = ImageFolder(args.root, Compose([Resize((64, 64)), RandomHorizontalFlip(), ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(ConvNet(len(data.classes)).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        total, n = all_reduce_sum([total, len(loader)], device)
        if is_main_process():
            print(f"epoch {epoch} loss {total / n:.4f}")
        save_on_master(model.module.state_dict(), out / "model.pt")
    cleanup()


if __name__ == "__main__":
    main()
