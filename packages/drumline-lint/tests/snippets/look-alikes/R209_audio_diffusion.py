import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from audiogen.config import load
from audiogen.data import ResumableLoader
from audiogen.diffusion import Denoiser, NoiseSchedule


def rng_state():
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state()}


def restore_rng(s):
    random.setstate(s["python"])
    np.random.set_state(s["numpy"])
    torch.set_rng_state(s["torch"])
    torch.cuda.set_rng_state(s["cuda"])


def save(folder, step, model, opt, loader):
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    torch.save({"rng": rng_state(), "loader": loader.state_dict()}, folder / f"rank{rank:04d}.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}, folder / "model.pt")
    dist.barrier()
    if rank == 0:
        (folder / "COMPLETE").touch()


def latest(out):
    done = sorted(p.parent for p in Path(out).glob("step-*/COMPLETE"))
    return done[-1] if done else None


def main():
    cfg = load()
    dist.init_process_group("nccl")
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    torch.cuda.set_device(local_rank)
    torch.manual_seed(cfg.seed + rank)

    model = DDP(Denoiser(**cfg.model).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    loader = ResumableLoader(cfg.data, cfg.batch_size, rank=rank, world_size=dist.get_world_size(), seed=cfg.seed)
    schedule = NoiseSchedule(cfg.timesteps).cuda()
    step = 0
    folder = latest(cfg.out)
    dist.barrier()
    if folder is not None:
        shared = torch.load(folder / "model.pt", map_location="cpu")
        model.module.load_state_dict(shared["model"])
        opt.load_state_dict(shared["opt"])
        step = shared["step"]
        mine = torch.load(folder / f"rank{rank:04d}.pt", map_location="cpu", weights_only=False)
        loader.load_state_dict(mine["loader"])
        restore_rng(mine["rng"])

    while step < cfg.steps:
        x = next(loader).cuda(non_blocking=True)
        t = torch.randint(cfg.timesteps, (x.size(0),), device="cuda")
        noise = torch.randn_like(x)
        loss = F.mse_loss(model(schedule.q_sample(x, t, noise), t), noise)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        step += 1
        if step % cfg.save_every == 0:
            save(Path(cfg.out) / f"step-{step:08d}", step, model, opt, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
