import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T


def is_main():
    return dist.get_rank() == 0


def report(step, loss):
    avg = loss.detach().clone()
    dist.all_reduce(avg)
    avg /= dist.get_world_size()
    if is_main():
        print(f"step {step}: {avg.item():.4f}", flush=True)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tf = T.Compose([T.RandomResizedCrop(224), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder("/data/rooms/train", tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 96, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    net = torchvision.models.mobilenet_v3_large(num_classes=len(ds.classes)).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    step = 0
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 100 == 0:
                report(step, loss)
        if is_main():
            torch.save(net.module.state_dict(), "rooms.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
