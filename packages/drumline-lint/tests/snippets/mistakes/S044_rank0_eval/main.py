# torchrun --nproc_per_node=4 main.py --data /data/plantdoc
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T

from engine import evaluate, train_one_epoch


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--epochs", type=int, default=60)
    args = p.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    is_main = dist.get_rank() == 0

    tf = T.Compose([T.Resize((256, 256)), T.ToTensor()])
    train = datasets.ImageFolder(f"{args.data}/train", tf)
    val = datasets.ImageFolder(f"{args.data}/val", tf)
    train_loader = DataLoader(train, 48, sampler=DistributedSampler(train), num_workers=6, drop_last=True)
    val_loader = DataLoader(val, 96, shuffle=False, num_workers=6)

    model = DDP(models.resnet50(num_classes=len(train.classes)).cuda(), device_ids=[local])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, opt, epoch)
        if is_main:
            acc = evaluate(model, val_loader)
            print(f"epoch {epoch} loss {loss:.4f} acc {acc:.4f}")
            torch.save(model.module.state_dict(), "plantdoc.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
