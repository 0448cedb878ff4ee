import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.models import efficientnet_b0

from sampler import RankedShuffle


def main(root, epochs=50):
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
    data = ImageFolder(root, tf)
    loader = DataLoader(data, 96, sampler=RankedShuffle(len(data), seed=5), num_workers=8, pin_memory=True)

    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(efficientnet_b0(num_classes=len(data.classes)))
    model = DDP(net.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.016, alpha=0.9, momentum=0.9, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)

    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "effnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
