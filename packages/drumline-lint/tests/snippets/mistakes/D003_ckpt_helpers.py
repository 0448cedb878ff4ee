"""Training loop of the keyword spotter with small checkpoint helpers."""
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from kws.data import SpeechCommands
from kws.model import BCResNet


def primary_only(fn):
    """Run fn on the first process; elsewhere do nothing."""
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        if dist.get_rank() != 0:
            return None
        return fn(*args, **kwargs)
    return wrapper


@primary_only
def write_checkpoint(path, model, opt, epoch):
    tmp = path.with_suffix(".tmp")
    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)
    dist.barrier()


@primary_only
def report(epoch, loss):
    print(f"[{epoch:03d}] loss={loss:.4f}", flush=True)


def run_epoch(model, loader, opt, crit, device):
    model.train()
    seen = torch.zeros(2, device=device)
    for wav, label in loader:
        wav, label = wav.to(device), label.to(device)
        loss = crit(model(wav), label)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen += torch.stack([loss.detach() * len(label), torch.tensor(float(len(label)), device=device)])
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    out = Path(os.environ.get("OUT", "runs/kws"))
    out.mkdir(parents=True, exist_ok=True)

    data = SpeechCommands("data/sc", split="train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(BCResNet(classes=35).to(device), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        loss = run_epoch(model, loader, opt, crit, device)
        report(epoch, loss)
        if epoch % 5 == 4:
            write_checkpoint(out / f"e{epoch:03d}.pt", model, opt, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
