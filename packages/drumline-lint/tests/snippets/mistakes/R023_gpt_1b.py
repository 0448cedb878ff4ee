import argparse
import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lm.data import token_loader
from lm.gpt import GPT, GPTConfig


def make_run_dir(base, name):
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = Path(base) / f"{name}-{stamp}"
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def shard_model(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def save(run_dir, step, model, optimizer):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=run_dir / f"step_{step:07d}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--runs", default="/fsx/runs")
    ap.add_argument("--name", default="gpt-1b")
    ap.add_argument("--steps", type=int, default=100_000)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--save-every", type=int, default=1000)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    run_dir = make_run_dir(args.runs, args.name)

    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=24, n_head=16, n_embd=2048))
    model = shard_model(model, init_device_mesh("cuda", (world,)))
    model.to_empty(device=device)
    model.init_weights()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps, pct_start=0.02)
    loader = token_loader(args.data, args.micro_batch, rank=rank, world_size=world)

    for step in range(1, args.steps + 1):
        x, y = (t.to(device, non_blocking=True) for t in next(loader))
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 20 == 0:
            avg = loss.detach().clone()
            dist.all_reduce(avg, op=dist.ReduceOp.AVG)
            if rank == 0:
                with open(run_dir / "log.txt", "a") as f:
                    f.write(f"{step} {avg.item():.4f}\n")
        if step % args.save_every == 0:
            save(run_dir, step, model, opt)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
