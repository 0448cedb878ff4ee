"""Fine-tune ResNet-50.   torchrun --nproc_per_node=8 flowers_finetune.py --data /data/flowers"""
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
def evaluate(net, loader, device):
    net.eval()
    hits = seen = 0
    for images, labels in loader:
        preds = net(images.to(device)).argmax(1).cpu()
        hits += (preds == labels).sum().item()
        seen += labels.numel()
    net.train()
    return hits / seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    train_set = datasets.ImageFolder(os.path.join(args.data, "train"), TF)
    val_set = datasets.ImageFolder(os.path.join(args.data, "val"), TF)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler, num_workers=6)
    val_loader = DataLoader(val_set, batch_size=128, num_workers=6)

    model = DDP(models.resnet50(num_classes=102).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.cuda()), labels.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            acc = evaluate(model, val_loader, torch.device("cuda", local_rank))
            print(f"epoch {epoch}: val acc {acc:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
