import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from climate.data import GridLoader
from climate.model import build_swin


def open_run_dir(base, tag):
    name = [f"{tag}-{time.strftime('%Y%m%d-%H%M%S')}"]
    dist.broadcast_object_list(name, src=0)
    path = Path(base) / name[0]
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--zarr", required=True)
    p.add_argument("--runs", default="/gpfs/climate/runs")
    p.add_argument("--tag", default="swin")
    p.add_argument("--steps", type=int, default=40_000)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--save-every", type=int, default=2000)
    args = p.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    run_dir = open_run_dir(args.runs, args.tag)

    torch.manual_seed(1)
    model = build_swin(in_chans=73).to(device)
    for stage in model.stages:
        fully_shard(stage)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps)
    loader = GridLoader(args.zarr, args.batch, rank=rank, world_size=world)

    for step in range(1, args.steps + 1):
        x, y = loader.next(device)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if rank == 0 and step % 100 == 0:
            with open(run_dir / "log.csv", "a") as f:
                f.write(f"{step},{loss.item():.5f}\n")
        if step % args.save_every == 0:
            model_sd, opt_sd = get_state_dict(model, opt)
            dcp.save({"model": model_sd, "opt": opt_sd}, checkpoint_id=run_dir / f"step{step:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
