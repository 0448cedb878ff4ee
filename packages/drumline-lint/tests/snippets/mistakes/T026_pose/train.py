import argparse
import os

import torch
import torch.distributed as dist
import wandb
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

from data import build_loader
from engine import evaluate, train_one_epoch
from models import build_model
from utils.dist import init_distributed, is_main_process


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--name", default="hrnet")
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)

    local_rank = init_distributed()
    wandb.init(project="pose", name=args.name, config=cfg)

    train_loader = build_loader(cfg, "train")
    val_loader = build_loader(cfg, "val")
    model = DDP(build_model(cfg).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, cfg["milestones"], 0.1)

    best = float("inf")
    for epoch in range(cfg["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        train_loss = train_one_epoch(model, train_loader, optimizer)
        val_err = evaluate(model, val_loader)
        scheduler.step()
        wandb.log({"train/loss": train_loss, "val/err": val_err, "lr": scheduler.get_last_lr()[0]}, step=epoch)
        if is_main_process() and val_err < best:
            best = val_err
            os.makedirs(cfg["out"], exist_ok=True)
            torch.save(model.module.state_dict(), os.path.join(cfg["out"], f"{args.name}.pt"))
    wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
