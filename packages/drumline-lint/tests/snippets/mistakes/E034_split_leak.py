import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split
from torchvision import models, transforms
from torchvision.datasets.folder import default_loader

ROOT = "/data/chest_xray"


class XRays(Dataset):
    def __init__(self):
        with open(os.path.join(ROOT, "labels.tsv")) as f:
            self.rows = [line.rstrip("\n").split("\t") for line in f]
        self.tf = transforms.Compose([transforms.Resize((320, 320)), transforms.ToTensor()])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        name, label = self.rows[i]
        return self.tf(default_loader(os.path.join(ROOT, "images", name))), float(label)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    full = XRays()
    n_val = len(full) // 10
    train, val = random_split(full, [len(full) - n_val, n_val])

    train_sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    val_sampler = DistributedSampler(val, shuffle=False, drop_last=True)
    train_loader = DataLoader(train, 32, sampler=train_sampler, num_workers=6, drop_last=True)
    val_loader = DataLoader(val, 64, sampler=val_sampler, num_workers=6)

    net = models.densenet121(weights="IMAGENET1K_V1")
    net.classifier = nn.Linear(net.classifier.in_features, 1)
    net = DDP(net.cuda(), device_ids=[local])
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(15):
        train_sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            loss = bce(net(x.cuda(non_blocking=True)).squeeze(1), y.float().cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

        net.eval()
        acc = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_loader:
                out = net.module(x.cuda(non_blocking=True)).squeeze(1)
                acc[0] += ((out > 0).float() == y.float().cuda()).sum()
                acc[1] += y.numel()
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} val acc {(acc[0] / acc[1]).item():.4f}")
            torch.save(net.module.state_dict(), "xray.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
