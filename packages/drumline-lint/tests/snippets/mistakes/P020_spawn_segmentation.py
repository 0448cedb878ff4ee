import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import Cityscapes
from torchvision.models.segmentation import deeplabv3_resnet50
from torchvision.transforms import v2


def find_free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", 0))
        return s.getsockname()[1]


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(find_free_port())
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


class Mapped(torch.utils.data.Dataset):
    def __init__(self, base, size=(512, 1024)):
        self.base = base
        self.img_tf = v2.Compose([v2.Resize(size), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
        self.lbl_tf = v2.Compose([v2.Resize(size, v2.InterpolationMode.NEAREST), v2.PILToTensor()])

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        img, lbl = self.base[i]
        lbl = self.lbl_tf(lbl).long().squeeze(0)
        lbl[lbl >= 34] = 255
        return self.img_tf(img), lbl


def worker(rank, world_size, args):
    setup(rank, world_size)
    ds = Mapped(Cityscapes(args.root, split="train", mode="fine", target_type="semantic"))
    sampler = DistributedSampler(ds, world_size, rank, shuffle=True)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=4, drop_last=True, pin_memory=True)

    model = deeplabv3_resnet50(weights=None, num_classes=34)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(rank)
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    iters = args.epochs * len(dl)
    poly = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=iters, power=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for img, lbl in dl:
            img, lbl = img.to(rank, non_blocking=True), lbl.to(rank, non_blocking=True)
            loss = F.cross_entropy(model(img)["out"], lbl, ignore_index=255)
            opt.zero_grad()
            loss.backward()
            opt.step()
            poly.step()
        if rank == 0:
            print(f"epoch {epoch} last loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/cityscapes")
    ap.add_argument("--epochs", type=int, default=80)
    ap.add_argument("--bs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--out", default="deeplab.pt")
    args = ap.parse_args()
    world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(world_size, args), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
