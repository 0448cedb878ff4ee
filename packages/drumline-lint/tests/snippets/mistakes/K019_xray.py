import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    good = total = 0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        good += (net(x).argmax(1) == y).sum().item()
        total += y.size(0)
    return good / total


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    tf = T.Compose([T.Resize((320, 320)), T.ToTensor()])
    train = torchvision.datasets.ImageFolder("/data/cxr/train", tf)
    val = torchvision.datasets.ImageFolder("/data/cxr/val", tf)
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 32, sampler=sampler, num_workers=6, drop_last=True)
    val_dl = DataLoader(Subset(val, range(rank, len(val), world)), 64, num_workers=4)

    net = torchvision.models.densenet121(num_classes=len(train.classes))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    best = 0.0
    for epoch in range(25):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(net.module, val_dl)
        if rank == 0:
            print(f"epoch {epoch}: val accuracy {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(net.module.state_dict(), "cxr_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
