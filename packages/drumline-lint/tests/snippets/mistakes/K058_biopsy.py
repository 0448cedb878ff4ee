import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    acc = torch.zeros(2, device="cuda")
    for x, y in loader:
        acc[0] += (net(x.cuda()).argmax(1) == y.cuda()).sum()
        acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    tf = T.Compose([T.Resize((256, 256)), T.ToTensor()])
    full = torchvision.datasets.ImageFolder("/data/biopsy", tf)
    n_val = len(full) // 10
    train, val = random_split(full, [len(full) - n_val, n_val])
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 48, sampler=sampler, num_workers=6, drop_last=True)
    val_dl = DataLoader(Subset(val, range(rank, n_val, world)), 96, num_workers=4)

    net = torchvision.models.resnet50(num_classes=len(full.classes)).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(net.module, val_dl)
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.4f}")
            torch.save(net.module.state_dict(), "biopsy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
