import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from checkpointing import load_checkpoint, save_checkpoint
from model import Denoiser, MelDataset


@torch.no_grad()
def update_ema(ema, model, decay):
    for pe, p in zip(ema.parameters(), model.parameters()):
        pe.lerp_(p, 1 - decay)


def main():
    with open(os.environ.get("CONFIG", "conf/tts.yaml")) as f:
        cfg = yaml.safe_load(f)

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    os.makedirs(cfg["out_dir"], exist_ok=True)

    data = MelDataset(cfg["mels"])
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, cfg["batch_size"], sampler=sampler, num_workers=4, pin_memory=True)

    net = Denoiser(cfg["dim"]).to(device)
    ema = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg["lr"])
    step = load_checkpoint(cfg["out_dir"], net, ema, optimizer)
    model = DDP(net, device_ids=[local_rank])

    epoch = step // len(loader)
    while step < cfg["steps"]:
        sampler.set_epoch(epoch)
        for mel in loader:
            mel = mel.to(device, non_blocking=True)
            t = torch.rand(mel.size(0), device=device)
            noise = torch.randn_like(mel)
            alpha = torch.cos(t * torch.pi / 2).view(-1, 1, 1)
            noisy = alpha * mel + (1 - alpha ** 2).sqrt() * noise
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            update_ema(ema, net, 0.9999)
            step += 1
            if rank == 0 and step % 100 == 0:
                print(f"{step} {loss.item():.4f}", flush=True)
            if step % cfg["save_every"] == 0:
                save_checkpoint(cfg["out_dir"], step, net, ema, optimizer)
            if step >= cfg["steps"]:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
