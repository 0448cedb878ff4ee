import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

EPOCHS = 90
BATCH = 128


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    tf = transforms.Compose([
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.49, 0.48, 0.44), (0.2, 0.2, 0.2)),
    ])
    train_set = datasets.CIFAR10("/datasets/cifar10", train=True, transform=tf)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=BATCH, sampler=train_sampler,
                              num_workers=4, pin_memory=True, drop_last=True)

    model = models.resnet18(num_classes=10).to(device)
    model = DDP(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

    for epoch in range(EPOCHS):
        t0 = time.time()
        model.train()
        for images, target in train_loader:
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            loss = criterion(model(images), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} ({time.time() - t0:.1f}s)")
            torch.save(model.module.state_dict(), "resnet18_cifar.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
