import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import mobilenet_v3_large, resnet152

from products import ProductPhotos


class Distiller(nn.Module):
    def __init__(self, classes, teacher_weights, temperature=4.0):
        super().__init__()
        self.student = mobilenet_v3_large(weights=None, num_classes=classes)
        self.teacher = resnet152(weights=None, num_classes=classes)
        self.teacher.load_state_dict(torch.load(teacher_weights, map_location="cpu"))
        self.teacher.requires_grad_(False)
        self.temperature = temperature

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, image, label):
        t = self.temperature
        with torch.no_grad():
            target = (self.teacher(image) / t).softmax(-1)
        logits = self.student(image)
        soft = F.kl_div((logits / t).log_softmax(-1), target, reduction="batchmean") * t * t
        return 0.7 * soft + 0.3 * F.cross_entropy(logits, label)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    photos = ProductPhotos("/data/products")
    sampler = DistributedSampler(photos)
    loader = DataLoader(photos, batch_size=96, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(Distiller(photos.classes, "/models/products-r152.pt").cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.module.student.parameters(), lr=0.2, momentum=0.9)

    for epoch in range(120):
        sampler.set_epoch(epoch)
        model.train()
        for image, label in loader:
            loss = model(image.cuda(non_blocking=True), label.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.student.state_dict(), "student.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
