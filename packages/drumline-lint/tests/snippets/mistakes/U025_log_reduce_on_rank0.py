import os
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
import wandb
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from vit.data import build_dataset
from vit.models import build_model


def is_main():
    return dist.get_rank() == 0


def average(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    if is_main():
        wandb.init(project=cfg.project, config=OmegaConf.to_container(cfg, resolve=True))

    dataset = build_dataset(cfg.data, split="train")
    sampler = DistributedSampler(dataset, shuffle=True, seed=cfg.seed)
    loader = DataLoader(dataset, cfg.batch_size, sampler=sampler, num_workers=cfg.workers,
                        pin_memory=True, drop_last=True)
    model = DDP(build_model(cfg.model).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.wd)

    global_step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            global_step += 1
            if is_main() and global_step % cfg.log_every == 0:
                wandb.log({"train/loss": average(loss), "epoch": epoch}, step=global_step)
        if is_main():
            Path(cfg.out).mkdir(parents=True, exist_ok=True)
            torch.save(model.module.state_dict(), Path(cfg.out) / "last.pt")

    if is_main():
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
