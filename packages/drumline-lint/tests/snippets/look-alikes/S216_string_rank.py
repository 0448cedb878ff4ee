# torchrun --nproc_per_node=2 string_rank.py
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import SVHN
from torchvision.transforms import ToTensor

IS_MAIN = os.environ.get("RANK", "0") == "0"
logging.basicConfig(stream=sys.stdout, level=logging.INFO if IS_MAIN else logging.ERROR)
log = logging.getLogger("svhn")


def prepare(root):
    if os.environ["LOCAL_RANK"] == "0":
        SVHN(root, split="train", download=True)
    dist.barrier()
    return SVHN(root, split="train", transform=ToTensor())


def main():
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=torch.device("cuda", gpu))
    ds = prepare("/tmp/svhn")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=4)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 64, 10))
    model = DDP(net.cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        log.info("epoch %d loss %.4f", epoch, loss.item())
        if IS_MAIN:
            torch.save(model.module.state_dict(), "svhn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
