import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T

import comm
from objective import NTXent


class Pair:
    def __init__(self):
        self.t = T.Compose([T.RandomResizedCrop(160), T.RandomHorizontalFlip(), T.ColorJitter(0.8, 0.8, 0.8, 0.2),
                            T.RandomGrayscale(0.2), T.ToTensor()])

    def __call__(self, img):
        return self.t(img), self.t(img)


def encoder(dim=128):
    net = models.resnet50(weights=None)
    net.fc = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(True), nn.Linear(2048, dim))
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data/stl10")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--batch", type=int, default=128)
    args = ap.parse_args()
    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(40 + comm.rank())
    data = datasets.ImageFolder(args.root, Pair())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    net = DDP(encoder().to(device), device_ids=[local_rank])
    criterion = NTXent()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for (a, b), _ in loader:
            z = net(torch.cat([a, b]).to(device, non_blocking=True))
            loss = criterion(*z.chunk(2))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if comm.is_primary():
            print(epoch, loss.item())
            torch.save(net.module.state_dict(), "simclr.pt")
    comm.teardown()


if __name__ == "__main__":
    main()
