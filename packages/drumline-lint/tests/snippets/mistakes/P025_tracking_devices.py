import os
import sys
from argparse import ArgumentParser

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
os.environ["CUDA_VISIBLE_DEVICES"] = str(LOCAL_RANK)
os.environ.setdefault("OMP_NUM_THREADS", "4")

import cv2
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class PairDataset(Dataset):
    """Template / search pairs from GOT-10k style sequence folders."""

    def __init__(self, root, gap=50):
        self.seqs = []
        for name in sorted(os.listdir(root)):
            folder = os.path.join(root, name)
            gt = os.path.join(folder, "groundtruth.txt")
            if os.path.isfile(gt):
                self.seqs.append((folder, [list(map(float, l.split(","))) for l in open(gt)]))
        self.gap = gap

    def __len__(self):
        return len(self.seqs)

    def crop(self, folder, idx, box, size):
        img = cv2.imread(os.path.join(folder, f"{idx + 1:08d}.jpg"))
        x, y, w, h = box
        s = max(int(2 * max(w, h)), 8)
        x0, y0 = max(int(x + w / 2 - s / 2), 0), max(int(y + h / 2 - s / 2), 0)
        patch = cv2.resize(img[y0:y0 + s, x0:x0 + s], (size, size))
        return torch.from_numpy(patch).permute(2, 0, 1).float() / 255

    def __getitem__(self, i):
        folder, boxes = self.seqs[i]
        a = int(torch.randint(0, len(boxes), (1,)))
        b = min(a + int(torch.randint(0, self.gap, (1,))), len(boxes) - 1)
        return self.crop(folder, a, boxes[a], 127), self.crop(folder, b, boxes[b], 255)


class SiamFC(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(3, 96, 11, 2), nn.GroupNorm(8, 96), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(96, 256, 5), nn.GroupNorm(8, 256), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(256, 256, 3))

    def forward(self, z, x):
        z, x = self.f(z), self.f(x)
        n, c, h, w = x.shape
        out = F.conv2d(x.reshape(1, n * c, h, w), z, groups=n)
        return out.transpose(0, 1) * 1e-3


def gaussian_label(n, size, device):
    r = torch.arange(size, device=device) - size // 2
    d = r[:, None] ** 2 + r[None] ** 2
    return (d <= 4).float().expand(n, 1, size, size)


def main():
    ap = ArgumentParser()
    ap.add_argument("--root", default="/data/got10k/train")
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save", default="siamfc.pt")
    args = ap.parse_args()

    torch.cuda.set_device(LOCAL_RANK)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())

    data = PairDataset(args.root)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=8, drop_last=True)
    net = DDP(SiamFC().to(device), device_ids=[device.index])
    opt = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.93)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for z, x in loader:
            out = net(z.to(device), x.to(device))
            loss = F.binary_cross_entropy_with_logits(out, gaussian_label(len(out), out.size(-1), device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", file=sys.stderr)
            torch.save(net.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
