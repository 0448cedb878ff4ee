import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T


def glyphs(split):
    tf = T.Compose([T.Grayscale(), T.Resize((32, 32)), T.ToTensor()])
    return torchvision.datasets.ImageFolder(f"/data/glyphs/{split}", tf)


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    right = sum((net(x.cuda()).argmax(1).cpu() == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    train, test = glyphs("train"), glyphs("test")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 256, sampler=sampler, num_workers=4, drop_last=True)
    test_dl = DataLoader(test, 512, num_workers=4)
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
                        nn.Flatten(), nn.Linear(576, len(train.classes)))
    model = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, accuracy(model.module, test_dl))
            torch.save(model.module.state_dict(), "glyphs.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
