from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models.detection import retinanet_resnet50_fpn_v2

from data import build_train_loader
from utils.dist import barrier, cleanup, init_distributed, is_main_process, save_on_master, seed_everything


@dataclass
class Config:
    image_dir: str = "data/coco/train2017"
    ann_file: str = "data/coco/annotations/instances_train2017.json"
    out: str = "runs/retinanet"
    batch_size: int = 4
    workers: int = 6
    epochs: int = 24
    lr: float = 2.5e-3
    seed: int = 17


class DetectionTrainer:
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        model = retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=91).to(device)
        self.model = DDP(model, device_ids=[device.index])
        self.loader = build_train_loader(cfg)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.optim, [16, 22])

    def train_epoch(self, epoch):
        self.model.train()
        for it, (images, targets) in enumerate(self.loader):
            images = [i.to(self.device, non_blocking=True) for i in images]
            targets = [{k: v.to(self.device) for k, v in t.items()} for t in targets]
            losses = self.model(images, targets)
            loss = sum(losses.values())
            self.optim.zero_grad(set_to_none=True)
            loss.backward()
            self.optim.step()
            if it % 50 == 0 and is_main_process():
                print(f"epoch {epoch} it {it}/{len(self.loader)} loss {loss.item():.3f}", flush=True)

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.train_epoch(epoch)
            self.sched.step()
            state = {"model": self.model.module.state_dict(), "optim": self.optim.state_dict(), "epoch": epoch}
            save_on_master(state, Path(self.cfg.out) / f"ckpt_{epoch:03d}.pth")


def main():
    cfg = Config()
    device = init_distributed()
    seed_everything(cfg.seed)
    if is_main_process():
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
    barrier()
    DetectionTrainer(cfg, device).fit()
    cleanup()


if __name__ == "__main__":
    main()
