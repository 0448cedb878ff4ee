"""Fine-tune EfficientNet; the small validation set is scored by one process.

torchrun --nproc_per_node=8 val_on_main.py --data /data/leaves
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

TF = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    hits = total = 0
    for x, y in loader:
        hits += (net(x.cuda()).argmax(1).cpu() == y).sum().item()
        total += len(y)
    net.train()
    return hits / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    train = datasets.ImageFolder(args.data + "/train", TF)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 64, sampler=sampler, num_workers=6)
    val_loader = DataLoader(datasets.ImageFolder(args.data + "/val", TF), 128, num_workers=6)
    model = DDP(models.efficientnet_b0(num_classes=38).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, accuracy(model.module, val_loader))
            torch.save(model.module.state_dict(), "leaves.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
