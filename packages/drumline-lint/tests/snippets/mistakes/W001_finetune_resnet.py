"""Fine-tune a ResNet-50 on the product photos.

torchrun --standalone --nproc_per_node=4 finetune.py --data /data/products
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def make_loader(root, batch_size):
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ])
    data = datasets.ImageFolder(root, tf)
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True,
                      num_workers=6, pin_memory=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="per GPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    loader = make_loader(os.path.join(args.data, "train"), args.batch_size)
    model = models.resnet50(num_classes=120).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            loss = loss_fn(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")
            torch.save(model.module.state_dict(), "resnet50.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
