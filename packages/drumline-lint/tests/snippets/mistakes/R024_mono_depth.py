import os

import hydra
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def is_main():
    return dist.get_rank() == 0


class DepthTrainer:
    def __init__(self, cfg: DictConfig):
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        self.net = instantiate(cfg.model).to(self.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.wd)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.epochs)
        self.start_epoch = 0
        self.ckpt_path = os.path.join(cfg.work_dir, "last.ckpt")
        if cfg.resume and is_main():
            self.load()
        self.model = DDP(self.net, device_ids=[self.local_rank])
        dataset = instantiate(cfg.dataset)
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(dataset, batch_size=cfg.batch_size, sampler=self.sampler, pin_memory=True,
                                 num_workers=cfg.workers, drop_last=True)

    def load(self):
        ckpt = torch.load(self.ckpt_path, map_location="cpu", weights_only=True)
        self.net.load_state_dict(ckpt["net"])
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.scheduler.load_state_dict(ckpt["scheduler"])
        self.start_epoch = ckpt["epoch"] + 1
        print(f"resumed from {self.ckpt_path} at epoch {self.start_epoch}", flush=True)

    def save(self, epoch):
        if is_main():
            tmp = self.ckpt_path + ".tmp"
            torch.save({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "scheduler": self.scheduler.state_dict(), "epoch": epoch}, tmp)
            os.replace(tmp, self.ckpt_path)
        dist.barrier()

    @staticmethod
    def silog(pred, gt, lam=0.85):
        mask = gt > 1e-3
        d = torch.log(pred[mask].clamp(min=1e-3)) - torch.log(gt[mask])
        return torch.sqrt((d ** 2).mean() - lam * d.mean() ** 2)

    def epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        meter = torch.zeros(2, device=self.device)
        for image, depth in self.loader:
            image = image.to(self.device, non_blocking=True)
            depth = depth.to(self.device, non_blocking=True)
            pred = F.interpolate(self.model(image), depth.shape[-2:], mode="bilinear", align_corners=False)
            loss = self.silog(pred, depth)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            meter += torch.stack([loss.detach(), torch.ones_like(loss)])
        self.scheduler.step()
        dist.all_reduce(meter)
        return (meter[0] / meter[1]).item()

    def run(self):
        for epoch in range(self.start_epoch, self.cfg.epochs):
            loss = self.epoch(epoch)
            if is_main():
                print(f"epoch {epoch} silog {loss:.4f}", flush=True)
            self.save(epoch)


@hydra.main(config_path="../conf", config_name="depth", version_base="1.3")
def main(cfg):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(cfg.seed)
    if is_main():
        print(OmegaConf.to_yaml(cfg))
    DepthTrainer(cfg).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
