import os

import timm
import torch
import torch.distributed as dist
import yaml
from timm.data import create_transform
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder

from schedule import total_steps, warmup_cosine


def main():
    with open("config.yaml") as f:
        cfg = yaml.safe_load(f)

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    ds = ImageFolder(cfg["train_dir"], create_transform(cfg["size"], is_training=True))
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, cfg["batch_per_gpu"], sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    net = timm.create_model(cfg["arch"], num_classes=len(ds.classes), drop_path_rate=0.1)
    net = DDP(net.cuda(), device_ids=[local])
    opt = torch.optim.AdamW(net.parameters(), cfg["lr"], weight_decay=0.05)
    steps = total_steps(len(ds), cfg["batch_per_gpu"], 1, cfg["epochs"])
    sched = warmup_cosine(opt, steps)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = net(x.cuda(non_blocking=True))
                loss = torch.nn.functional.cross_entropy(out, y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.2e}", flush=True)
            torch.save({"net": net.module.state_dict(), "epoch": epoch}, "last.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
