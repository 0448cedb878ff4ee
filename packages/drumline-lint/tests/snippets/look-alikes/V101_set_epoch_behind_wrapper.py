import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


class CudaLoader:
    def __init__(self, dataset, batch_size, workers):
        self.loader = DataLoader(dataset, batch_size, num_workers=workers, pin_memory=True, drop_last=True,
                                 sampler=DistributedSampler(dataset, shuffle=True, drop_last=True))
        self.passes = 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.loader.sampler.set_epoch(self.passes)
        self.passes += 1
        for images, labels in self.loader:
            yield images.cuda(non_blocking=True), labels.cuda(non_blocking=True)


def main(root="/data/imagenet", epochs=90):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tfm = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    loader = CudaLoader(datasets.ImageFolder(f"{root}/train", tfm), 128, workers=8)
    model = DDP(models.convnext_tiny().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, epochs * len(loader))

    for epoch in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), "convnext.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
