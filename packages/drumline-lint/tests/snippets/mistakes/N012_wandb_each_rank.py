import os

import torch
import torch.distributed as dist
import wandb
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from diffusion.data import LatentDataset
from diffusion.unet import UNetModel
from diffusion.schedule import NoiseSchedule


def train(cfg):
    dist.init_process_group("nccl")
    global_rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    wandb.init(
        project=cfg.wandb.project,
        name=cfg.run_name,
        config=OmegaConf.to_container(cfg, resolve=True),
    )

    model = DDP(UNetModel(**cfg.model).cuda(), device_ids=[local_rank])
    sched = NoiseSchedule(cfg.timesteps, device=torch.device("cuda", local_rank))
    ds = LatentDataset(cfg.data.path)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, cfg.batch_size, sampler=sampler, num_workers=4, drop_last=True)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for z in loader:
            z = z.cuda(non_blocking=True)
            t = torch.randint(0, cfg.timesteps, (len(z),), device=z.device)
            noise = torch.randn_like(z)
            loss = (model(sched.q_sample(z, t, noise), t) - noise).pow(2).mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            if step % cfg.log_every == 0:
                wandb.log({"loss": loss.item(), "epoch": epoch}, step=step)
            step += 1
        if global_rank == 0:
            torch.save(model.module.state_dict(), os.path.join(cfg.out, "unet.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(OmegaConf.load("conf/train.yaml"))
