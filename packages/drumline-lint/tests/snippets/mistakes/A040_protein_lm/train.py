import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from boot import boot
from checkpointing import load, save
from protein import ProteinLM, Layer, residues


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--ckpt", default="/scratch/protein.pt")
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()

    device = boot(seed=40)
    model = ProteinLM()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    model = FSDP(model, auto_wrap_policy=policy, device_id=device, sync_module_states=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    start = load(args.ckpt, model, optimizer) if args.resume else 0

    loader, sampler = residues("uniref.pt", 16)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for tokens, labels in loader:
            logits = model(tokens.to(device))
            loss = F.cross_entropy(logits.transpose(1, 2), labels.to(device), ignore_index=-100)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        save(args.ckpt, model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
