import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanolm.data import sharded_batches
from nanolm.model import ModelArgs, Transformer


def apply_fsdp(model, mesh):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    return model


def build(args, device):
    model = Transformer(args).to(device)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=3e-4, betas=(0.9, 0.95), fused=True,
    )
    return model, optimizer


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(1234)

    model, optimizer = build(ModelArgs(dim=2048, n_layers=24, n_heads=16), "cuda")
    model = apply_fsdp(model, mesh)

    for step, (tokens, labels) in enumerate(sharded_batches("fineweb", rank, world, max_steps=20_000)):
        logits = model(tokens.cuda(non_blocking=True))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.cuda(non_blocking=True).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:6d} loss {mean.item():.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
