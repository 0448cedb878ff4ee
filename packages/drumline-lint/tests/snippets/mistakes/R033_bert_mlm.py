import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertConfig, BertForMaskedLM

from mlm.data import MaskedChunks


def linear_warmup(optimizer, warmup, total):
    def fn(step):
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))
    return LambdaLR(optimizer, fn)


def no_decay_groups(model, wd):
    skip = ("bias", "LayerNorm.weight")
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not n.endswith(skip)], "weight_decay": wd},
        {"params": [p for n, p in named if n.endswith(skip)], "weight_decay": 0.0},
    ]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--chunks", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch-size", type=int, default=64, help="sequences per GPU and step")
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--warmup-frac", type=float, default=0.06)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(args.seed)

    dataset = MaskedChunks(args.chunks)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=6,
                        pin_memory=True, drop_last=True)

    model = BertForMaskedLM(BertConfig(vocab_size=32000)).to(device)
    optimizer = torch.optim.AdamW(no_decay_groups(model, 0.01), lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    model = DDP(model, device_ids=[local_rank])

    steps_per_epoch = len(dataset) // args.batch_size
    total_steps = steps_per_epoch * args.epochs
    scheduler = linear_warmup(optimizer, int(args.warmup_frac * total_steps), total_steps)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for ids, labels in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=ids.to(device, non_blocking=True),
                             labels=labels.to(device, non_blocking=True)).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 100 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} step {step} loss {avg.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}",
                          flush=True)
        if dist.get_rank() == 0:
            model.module.save_pretrained(os.path.join(args.out, f"epoch-{epoch}"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
