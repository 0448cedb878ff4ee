import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T


class TwoViews:
    def __init__(self):
        self.t = T.Compose([T.RandomResizedCrop(32, (0.2, 1)), T.RandomHorizontalFlip(),
                            T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomGrayscale(0.2), T.ToTensor()])

    def __call__(self, img):
        return self.t(img), self.t(img)


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.enc = torchvision.models.resnet18(num_classes=512)
        self.proj = nn.Sequential(nn.ReLU(), nn.Linear(512, dim))

    def forward(self, x):
        return F.normalize(self.proj(self.enc(x)), dim=1)


def gather_features(z, rank, world):
    bucket = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(bucket, z.detach().contiguous())
    bucket[rank] = z
    return torch.cat(bucket)


def info_nce(a, b, rank, world, tau=0.2):
    all_b = gather_features(b, rank, world)
    all_a = gather_features(a, rank, world)
    logits = all_a @ all_b.t() / tau
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = torchvision.datasets.CIFAR10("/data/cifar", transform=TwoViews())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=8, drop_last=True)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(SimCLR()).cuda()
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), 0.03 * 256 * world / 256, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
    for epoch in range(500):
        sampler.set_epoch(epoch)
        for (x1, x2), _ in loader:
            z = model(torch.cat([x1, x2]).cuda(non_blocking=True))
            a, b = z.chunk(2)
            loss = info_nce(a, b, rank, world)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(epoch, loss.item())
            torch.save(net.enc.state_dict(), "simclr.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
