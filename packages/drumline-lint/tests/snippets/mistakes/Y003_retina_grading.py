"""Diabetic retinopathy grading, 8 GPUs of one machine, started by torchrun."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

DATA = os.environ.get("RETINA_DATA", "/data/aptos")
EPOCHS = 25


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    right = total = 0
    for images, grade in loader:
        logits = model(images.to(device, non_blocking=True))
        right += (logits.argmax(1).cpu() == grade).sum().item()
        total += grade.numel()
    return right / total


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    norm = transforms.Normalize([0.43, 0.29, 0.21], [0.28, 0.20, 0.17])
    train_tf = transforms.Compose([transforms.RandomResizedCrop(384, (0.7, 1.0)),
                                   transforms.RandomVerticalFlip(),
                                   transforms.ToTensor(), norm])
    val_tf = transforms.Compose([transforms.Resize((384, 384)),
                                 transforms.ToTensor(), norm])
    train_set = datasets.ImageFolder(f"{DATA}/train", train_tf)
    val_set = datasets.ImageFolder(f"{DATA}/val", val_tf)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 24, sampler=sampler, num_workers=8,
                              pin_memory=True, drop_last=True)
    val_loader = DataLoader(val_set, 64, shuffle=False, num_workers=8, pin_memory=True)

    model = models.resnet50(weights=None, num_classes=5).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    best = 0.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, grade in train_loader:
            images = images.to(device, non_blocking=True)
            grade = grade.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), grade)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

        if rank == 0:
            acc = evaluate(model, val_loader, device)
            print(f"epoch {epoch:02d} val acc {acc:.4f}", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "retina_best.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
