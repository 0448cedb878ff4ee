import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T

from losses import nt_xent


class TwoViews:
    def __init__(self, tf):
        self.tf = tf

    def __call__(self, img):
        return self.tf(img), self.tf(img)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tf = T.Compose([T.RandomResizedCrop(96), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4),
                    T.ToTensor()])
    ds = torchvision.datasets.ImageFolder("/data/stl/unlabeled", TwoViews(tf))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=8, drop_last=True)
    net = torchvision.models.resnet18(num_classes=128)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.6, momentum=0.9, weight_decay=1e-4)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for (a, b), _ in loader:
            z = net(torch.cat([a, b]).cuda(non_blocking=True))
            loss = nt_xent(*z.chunk(2))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "simclr.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
