import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from sr.data import DIV2KPatches
from sr.edsr import EDSR


@dataclass
class AmpStep:
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    max_norm: float = 0.5

    def __call__(self, loss, params):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm


def main():
    dist.init_process_group("nccl")
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(dev)

    ds = DIV2KPatches("/data/div2k", scale=4, patch=192)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(EDSR(blocks=32, feats=256, scale=4).to(dev), device_ids=[dev.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    step = AmpStep(optimizer, torch.amp.GradScaler("cuda"))

    for epoch in range(300):
        sampler.set_epoch(epoch)
        model.train()
        for it, (lr_img, hr_img) in enumerate(loader):
            lr_img, hr_img = lr_img.to(dev, non_blocking=True), hr_img.to(dev, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.l1_loss(model(lr_img), hr_img)
            norm = step(loss, model.parameters())
            if dist.get_rank() == 0 and it % 100 == 0:
                print(f"{epoch}/{it} loss {loss.item():.4f} norm {norm.item():.3f}")
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scaler": step.scaler.state_dict(), "epoch": epoch}, "edsr.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
