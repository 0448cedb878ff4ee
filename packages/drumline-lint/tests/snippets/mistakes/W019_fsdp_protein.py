import argparse
import itertools
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from protein import EncoderLayer, MaskedProteins, ProteinBert


def get_args():
    ap = argparse.ArgumentParser(description="protein language model, start with torchrun")
    ap.add_argument("--lr", type=float, default=4e-4)
    ap.add_argument("--steps", type=int, default=100_000)
    return ap.parse_args()


def batches(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def main():
    args = get_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = MaskedProteins("/data/uniref50.lmdb")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 12, sampler=sampler, num_workers=4, drop_last=True)
    model = ProteinBert(layers=33, width=1280)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={EncoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        sync_module_states=True,
        device_id=device,
    )

    for step, batch in zip(range(args.steps), batches(loader, sampler)):
        tokens, labels = (t.to(device, non_blocking=True) for t in batch)
        loss = model(tokens, labels)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 and dist.get_rank() == 0:
            print(f"{step:>7} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
