"""Launch: srun torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d ... N007_multinode_sampler.py"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from vit.config import load_config
from vit.dataset import ImageFolderLMDB
from vit.model import vit_base


class Env:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])

    @property
    def master(self):
        return self.rank == 0


def make_loader(cfg, env):
    ds = ImageFolderLMDB(cfg.train_lmdb)
    sampler = DistributedSampler(
        ds,
        num_replicas=torch.cuda.device_count(),
        rank=env.local_rank,
        shuffle=True,
    )
    return DataLoader(ds, batch_size=cfg.batch_size, sampler=sampler,
                      num_workers=10, pin_memory=True, drop_last=True), sampler


def main():
    env = Env()
    torch.cuda.set_device(env.local_rank)
    dist.init_process_group("nccl")
    cfg = load_config("configs/vit_b16.yaml")
    loader, sampler = make_loader(cfg, env)
    model = DDP(vit_base().cuda(), device_ids=[env.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.05)
    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for it, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = loss_fn(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if env.master and it % 50 == 0:
                print(f"e{epoch} i{it} {loss.item():.3f}")
        if env.master:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, cfg.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
