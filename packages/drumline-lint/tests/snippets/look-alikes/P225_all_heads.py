import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class FaceAttributes(Dataset):
    def __init__(self, root):
        self.index = np.load(os.path.join(root, "index.npy"), allow_pickle=False)
        self.images = np.load(os.path.join(root, "images.npy"), mmap_mode="r")

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        img = torch.from_numpy(np.array(self.images[i])).permute(2, 0, 1).float() / 255
        age, gender, pose = self.index[i]
        return img, {"age": torch.tensor(age / 100, dtype=torch.float32), "gender": int(gender), "pose": int(pose)}


class FaceNet(nn.Module):
    def __init__(self, poses=9):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 5, 2), nn.GroupNorm(8, 64), nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2), nn.GroupNorm(8, 128), nn.ReLU(),
            nn.Conv2d(128, 256, 3, 2), nn.GroupNorm(8, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.heads = nn.ModuleDict({"age": nn.Linear(256, 1), "gender": nn.Linear(256, 2),
                                    "pose": nn.Linear(256, poses)})

    def forward(self, x):
        f = self.body(x)
        return {k: h(f) for k, h in self.heads.items()}


def losses(out, y):
    return {"age": F.smooth_l1_loss(out["age"].squeeze(1), y["age"]),
            "gender": F.cross_entropy(out["gender"], y["gender"]),
            "pose": F.cross_entropy(out["pose"], y["pose"])}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/faces")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--weights", default="age=5,gender=1,pose=1")
    ap.add_argument("--out", default="faces.pt")
    args = ap.parse_args()
    weight = {k: float(v) for k, v in (p.split("=") for p in args.weights.split(","))}

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = FaceAttributes(args.root)
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(FaceNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in dl:
            parts = losses(model(x.cuda()), {k: v.cuda() for k, v in y.items()})
            total = sum(weight[k] * v for k, v in parts.items())
            opt.zero_grad(set_to_none=True)
            total.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, {k: round(v.item(), 4) for k, v in parts.items()}, flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
