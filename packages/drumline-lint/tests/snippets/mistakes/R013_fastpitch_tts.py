import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter

from tts.config import load_config
from tts.data import LJSpeech, pad_collate
from tts.models import FastPitch


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Checkpointer:
    def __init__(self, directory, keep=3):
        self.directory = directory
        self.keep = keep
        os.makedirs(directory, exist_ok=True)

    def save(self, step, model, optimizer, scheduler):
        path = os.path.join(self.directory, f"ckpt_{step:08d}.pt")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict()}, path)
        return path

    def latest(self):
        files = sorted(f for f in os.listdir(self.directory) if f.startswith("ckpt_"))
        return os.path.join(self.directory, files[-1]) if files else None


def mel_loss(out, batch):
    mask = batch["mel_mask"].unsqueeze(1)
    mel = ((out["mel"] - batch["mel"]).abs() * mask).sum() / (mask.sum() * batch["mel"].size(1))
    dur = nn.functional.mse_loss(out["log_dur"], torch.log1p(batch["dur"].float()))
    pitch = nn.functional.mse_loss(out["pitch"], batch["pitch"])
    return mel + 0.1 * dur + 0.1 * pitch


def train(cfg):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    is_main = dist.get_rank() == 0
    seed_all(cfg.seed + dist.get_rank())

    ds = LJSpeech(cfg.data_dir, cfg.filelist)
    sampler = DistributedSampler(ds, seed=cfg.seed)
    loader = DataLoader(ds, cfg.batch_size, sampler=sampler, collate_fn=pad_collate,
                        num_workers=cfg.workers, pin_memory=True, drop_last=True)
    model = DDP(FastPitch(cfg.model).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    writer = SummaryWriter(cfg.log_dir) if is_main else None
    ckpt = Checkpointer(cfg.ckpt_dir)

    step, epoch = 0, 0
    if ckpt.latest():
        state = torch.load(ckpt.latest(), map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step, epoch = state["step"], state["step"] // len(loader)
    dist.barrier()

    while step < cfg.max_steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = mel_loss(model(batch), batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
            optimizer.step()
            step += 1
            if is_main and step % 100 == 0:
                writer.add_scalar("train/loss", loss.item(), step)
            if step % cfg.save_every == 0:
                ckpt.save(step, model.module, optimizer, scheduler)
                dist.barrier()
        scheduler.step()
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    train(load_config())
