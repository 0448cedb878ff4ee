from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from builder import build_model
from utils.dist import all_reduce_sum, cleanup, get_world_size, init_distributed, is_main_process, save_on_master
from utils.dist import seed_everything


@dataclass
class SegConfig:
    root: str = "data/cityscapes"
    num_classes: int = 19
    sync_bn: bool = True
    batch_size: int = 2
    epochs: int = 80
    lr: float = 0.01
    seed: int = 4


def dataset(root):
    tf = v2.Compose([
        v2.ToImage(), v2.RandomCrop((512, 1024)), v2.RandomHorizontalFlip(),
        v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}, scale=True),
    ])
    data = datasets.Cityscapes(root, split="train", mode="fine", target_type="semantic", transforms=tf)
    return datasets.wrap_dataset_for_transforms_v2(data)


def main():
    cfg = SegConfig()
    device = init_distributed()
    seed_everything(cfg.seed)
    data = dataset(cfg.root)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.batch_size, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model = build_model(cfg, device)
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, cfg.epochs * len(loader), power=0.9)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for image, mask in loader:
            image, mask = image.to(device, non_blocking=True), mask.to(device, non_blocking=True)
            loss = F.cross_entropy(model(image), mask.squeeze(1), ignore_index=255)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.item()
        (total,) = all_reduce_sum([total / len(loader)], device)
        if is_main_process():
            print(epoch, total / get_world_size())
        save_on_master(model.module.state_dict(), "deeplab.pt")
    cleanup()


if __name__ == "__main__":
    main()
