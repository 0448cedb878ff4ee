import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from data import loaders


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    t = torch.zeros(2, device="cuda")
    for x, y in loader:
        t[0] += (net(x.cuda()).argmax(1) == y.cuda()).sum()
        t[1] += len(y)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_dl, val_dl, classes = loaders("/data/insects", rank, world)
    net = torchvision.models.resnet34(num_classes=classes).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(30):
        train_dl.sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(net.module, val_dl)
        if rank == 0:
            print(f"{epoch}: {acc:.4f}")
            torch.save(net.module.state_dict(), "insects.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
