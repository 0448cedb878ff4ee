# GPT training on tokenized shards, torchrun --nproc_per_node=8 train_gpt.py --run baseline
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM


def lr_at(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    t = (step - args.warmup) / max(1, args.max_steps - args.warmup)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(t, 1.0)))


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--run", required=True)
    ap.add_argument("--config", default="EleutherAI/pythia-160m")
    ap.add_argument("--tokens", default="fineweb_1B.pt")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--max-steps", type=int, default=30000)
    ap.add_argument("--warmup", type=int, default=700)
    ap.add_argument("--lr", type=float, default=6e-4)
    ap.add_argument("--min-lr", type=float, default=6e-5)
    ap.add_argument("--ckpt", default="ckpt")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    world = dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision("high")

    wandb.init(project="small-gpt", name=args.run, config=vars(args))

    tokens = torch.load(args.tokens, map_location="cpu", mmap=True)
    ds = TensorDataset(tokens.view(-1, 1024))
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, pin_memory=True, drop_last=True)

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config)).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)

    stream = batches(loader, sampler)
    t0 = time.time()
    for step in range(args.max_steps):
        for g in opt.param_groups:
            g["lr"] = lr_at(step, args)
        (ids,) = next(stream)
        ids = ids.long().cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

        if step % 10 == 0:
            dt, t0 = time.time() - t0, time.time()
            wandb.log({"loss": loss.item(), "lr": lr_at(step, args), "grad_norm": norm.item(),
                       "tok_per_s": 10 * args.batch * world * 1024 / dt}, step=step)
        if rank == 0 and step and step % 2000 == 0:
            os.makedirs(args.ckpt, exist_ok=True)
            torch.save(model.module.state_dict(), f"{args.ckpt}/{args.run}_{step}.pt")

    wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
