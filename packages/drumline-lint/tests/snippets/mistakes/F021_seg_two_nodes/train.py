import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.io import read_image
from torchvision.models.segmentation import deeplabv3_resnet50

import config


class Tiles(Dataset):
    def __init__(self, root, split):
        self.images = sorted(Path(root, split, "image").glob("*.png"))
        self.labels = sorted(Path(root, split, "label").glob("*.png"))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = read_image(str(self.images[i])).float() / 255
        label = read_image(str(self.labels[i]))[0].long()
        if torch.rand(()) < 0.5:
            image, label = image.flip(-1), label.flip(-1)
        return image, label


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)

    train_set = Tiles(config.DATA, "train")
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(train_set, config.BATCH_PER_GPU, sampler=sampler, num_workers=6, drop_last=True)

    model = deeplabv3_resnet50(weights=None, num_classes=config.CLASSES)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DDP(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=config.LR, momentum=0.9, weight_decay=1e-4)
    total = config.EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total, power=0.9)

    os.makedirs(config.RUNS, exist_ok=True)
    for epoch in range(config.EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for image, label in loader:
            image, label = image.to(device), label.to(device)
            loss = F.cross_entropy(model(image)["out"], label, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(config.RUNS, "last.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
