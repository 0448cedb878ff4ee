import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from depth.kitti import KittiDepth
from depth.models import BTS


@dataclass
class Config:
    root: str = "/data/kitti"
    out: Path = Path("checkpoints")
    epochs: int = 50
    batch_size: int = 4
    lr: float = 1e-4


class DepthTrainer:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = dist.get_rank()
        self.device = torch.device("cuda", self.local_rank)
        self.model = DDP(BTS().to(self.device), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        ds = KittiDepth(cfg.root, split="eigen_train")
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, cfg.batch_size, sampler=self.sampler, num_workers=4)
        cfg.out.mkdir(parents=True, exist_ok=True)

    def save(self, epoch):
        state = {
            "epoch": epoch,
            "model": self.model.module.state_dict(),
            "optimizer": self.opt.state_dict(),
        }
        torch.save(state, self.cfg.out / "latest.pth")

    def run(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for img, gt in self.loader:
                img, gt = img.to(self.device), gt.to(self.device)
                loss = self.silog(self.model(img), gt)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.save(epoch)
            if self.rank == 0:
                print(f"epoch {epoch} done, loss={loss.item():.4f}")

    @staticmethod
    def silog(pred, gt, lam=0.85):
        mask = gt > 0.1
        d = torch.log(pred[mask]) - torch.log(gt[mask])
        return torch.sqrt((d ** 2).mean() - lam * d.mean() ** 2) * 10.0


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    DepthTrainer(Config()).run()
    dist.destroy_process_group()
