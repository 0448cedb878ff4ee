"""Linear probing first, then the whole network. One machine, torchrun."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import ConvNeXt_Tiny_Weights, convnext_tiny

WARM_EPOCHS = 3
EPOCHS = 15


def build(n_classes):
    # the weights are in the image's torch hub cache
    net = convnext_tiny(weights=ConvNeXt_Tiny_Weights.IMAGENET1K_V1)
    net.classifier[2] = nn.Linear(768, n_classes)
    for p in net.features.parameters():
        p.requires_grad = False
    return net


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    data = datasets.ImageFolder("/data/nabirds/train", transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    model = DDP(build(len(data.classes)).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.module.classifier.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        if epoch == WARM_EPOCHS:
            for p in model.module.features.parameters():
                p.requires_grad = True
            optimizer.add_param_group(
                {"params": model.module.features.parameters(), "lr": 1e-5})
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "nabirds.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
