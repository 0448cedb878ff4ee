"""Train a ConvNeXt with AdamW sharded by ZeroRedundancyOptimizer."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.models import convnext_base

OUT = "runs/convnext_food"


def random_states():
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}


def save(rank, epoch, model, optimizer):
    torch.save(
        {"optim": optimizer.optim.state_dict(), "rng": random_states(), "epoch": epoch},
        os.path.join(OUT, f"optim_rank{rank:03d}.pt"),
    )
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(OUT, "model.pt"))
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    os.makedirs(OUT, exist_ok=True)

    data = ImageFolder("/data/food101/train", T.Compose([
        T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.AutoAugment(), T.ToTensor(),
        T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 64, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    model = DDP(convnext_base(num_classes=101).to(device), device_ids=[local_rank])
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, weight_decay=0.05
    )
    epochs = 100
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        if epoch % 5 == 4:
            save(rank, epoch, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
